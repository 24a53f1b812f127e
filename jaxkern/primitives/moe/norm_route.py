"""The norm before a mixture of experts and the choice of them, in one op.

normal = rms_norm(x) * norm
logits = normal router^T + router_bias          float32 (or wider)
weights, ids = route(logits)
"""

from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.dense_product import product
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.moe.route import check_sizes, route_reference
from jaxkern.primitives.norm.rms_norm import rms_norm_reference


class Choice(TypedDict):
    """Options of `route`."""

    k: int
    score: str
    normalize: bool
    num_groups: int
    top_groups: int
    group_score: str
    scaling_factor: float


def norm_route_reference(
    x: Float[Array, "... d"],
    norm: Float[Array, " d"],
    router: Float[Array, "e d"],
    router_bias: Float[Array, " e"] | None,
    correction_bias: Float[Array, " e"] | None,
    opening: Float[Array, " d"] | None,
    *,
    eps: float,
    shared: bool,
    **options: Unpack[Choice],
) -> tuple[Float[Array, "... d"], Float[Array, "... slots"], Int32[Array, "... slots"]]:
    """Where `shared`, a last slot is that of an expert which every token passes.

    Its id is the number of the others, its weight sigmoid(normal . opening), or 1 where
    there is no opening.
    """
    sizes = options["k"], options["num_groups"], options["top_groups"]
    check_sizes(router.shape[0], *sizes, op="norm_route")
    x32 = at_least_f32(x)
    normal = rms_norm_reference(x32, norm, None, eps=eps, offset=0.0)
    exact = lax.Precision.HIGHEST  # rounded logits would choose other experts
    logits = product(normal, at_least_f32(router), None, exact, x32.dtype)
    if router_bias is not None:
        logits = logits + at_least_f32(router_bias)
    weights, ids = route_reference(
        logits, None, correction_bias, scale_then_renorm=False, **options
    )
    if shared:
        one = jnp.ones_like(weights[..., :1])
        if opening is not None:
            one = jax.nn.sigmoid(jnp.sum(normal * at_least_f32(opening), -1))[..., None]
        weights = jnp.concatenate([weights, one], axis=-1)
        last = jnp.full_like(ids[..., :1], router.shape[0])
        ids = jnp.concatenate([ids, last], axis=-1)
    return normal.astype(x.dtype), weights, ids


norm_route_p = kernel_primitive(
    norm_route_reference,
    replicated=("d", "e"),  # any expert may be the best
)
