"""Cross entropy with a target for every class, and the sum that all its forms share."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.activation.softcap import (
    softcap_bwd_reference,
    softcap_reference,
)
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


def capped(x: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    return x if softcap is None else softcap_reference(x, cap=softcap)


def log_sum_exp(z: Float[Array, "... v"]) -> Float[Array, "..."]:
    """ln(sum(exp(z))) over the last dim; -inf, with zero gradients, if all are -inf."""
    top = jnp.max(z, axis=-1, keepdims=True, initial=-jnp.inf)
    # any finite number is right here, so it has no gradient
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    total = jnp.sum(jnp.exp(z - top), axis=-1)
    none = total == 0
    return jnp.where(none, -jnp.inf, top[..., 0] + jnp.log(jnp.where(none, 1, total)))


def soft_cross_entropy_reference(
    logits: Float[Array, "... v"],
    targets: Float[Array, "... v"],
    class_weights: Float[Array, " v"] | None,
    *,
    z_loss: float,
    softcap: float | None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """(loss, lse): loss = sum_j w_j t_j (lse - z_j) + z_loss lse**2."""
    z = capped(at_least_f32(logits), softcap)
    lse = log_sum_exp(z)
    none, finite_lse = lse == -jnp.inf, jnp.where(lse == -jnp.inf, 0, lse)
    weight = weighed(targets, class_weights)
    loss = jnp.sum(weight * surprise(z, finite_lse, weight), axis=-1)
    if z_loss:
        loss = loss + z_loss * finite_lse**2
    return jnp.where(none, jnp.inf, loss), lse


def soft_cross_entropy_bwd_reference(
    logits: Float[Array, "... v"],
    targets: Float[Array, "... v"],
    class_weights: Float[Array, " v"] | None,
    loss: Float[Array, "..."],
    lse: Float[Array, "..."],
    dloss: Float[Array, "..."],
    dlse: Float[Array, "..."],
    *,
    z_loss: float,
    softcap: float | None,
) -> tuple[Float[Array, "... v"], Float[Array, "... v"], Float[Array, " v"] | None]:
    del loss
    x = at_least_f32(logits)
    z = capped(x, softcap)
    none = lse == -jnp.inf
    lse, dloss = jnp.where(none, 0, lse), jnp.where(none, 0, dloss)
    weight = weighed(targets, class_weights)
    slope = dloss * (weight.sum(-1) + 2 * z_loss * lse) + dlse
    dz = slope[..., None] * jnp.exp(z - lse[..., None]) - dloss[..., None] * weight
    dlogits = dz if softcap is None else softcap_bwd_reference(x, dz, cap=softcap)
    gap = surprise(z, lse, weight)
    dweight = jnp.where(none[..., None], 0, dloss[..., None] * gap)
    dtargets, dclass_weights = dweight, None
    if class_weights is not None:
        dtargets = dweight * at_least_f32(class_weights)
        rows = tuple(range(targets.ndim - 1))
        dclass_weights = (dweight * at_least_f32(targets)).sum(rows)
        dclass_weights = dclass_weights.astype(class_weights.dtype)
    return dlogits.astype(logits.dtype), dtargets.astype(targets.dtype), dclass_weights


def weighed(targets, class_weights):
    t = at_least_f32(targets)
    return t if class_weights is None else t * at_least_f32(class_weights)


def surprise(z, lse, weight):
    """lse - z; 0, not inf, for a class of probability zero that is no target."""
    absent = (z == -jnp.inf) & (weight == 0)
    return jnp.where(absent, 0, lse[..., None] - jnp.where(absent, 0, z))


soft_cross_entropy_p = kernel_primitive(
    soft_cross_entropy_reference,
    bwd=soft_cross_entropy_bwd_reference,
    replicated=("v",),  # the sum runs over v: each device needs all of it
)
