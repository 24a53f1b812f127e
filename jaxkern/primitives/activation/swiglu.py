"""SwiGLU: y = silu(gate) * up, silu(z) = z * sigmoid(z)  (https://arxiv.org/abs/2002.05202)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def swiglu(
    gate: Float[Array, "..."],
    up: Float[Array, "..."] | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Float[Array, "..."]:
    """Gated SiLU of a transformer's feed-forward block (https://arxiv.org/abs/2002.05202).

        y = z / (1 + exp(-alpha * z)) * (u + up_offset)
        z = min(gate, limit),    u = min(max(up, -limit), limit)

    which is silu(gate) * up unless an option is given. GPT-OSS has alpha=1.702,
    limit=7.0 and up_offset=1.0 (and packs gate and up alternately: `w[0::2]`,
    `w[1::2]` of its weights). A value at its limit has the full gradient, one beyond it
    none.

    Computed in float32 and rounded once. Only `gate` and `up` are kept for the backward
    pass. As in other libraries silu(-inf) is NaN (its limit is 0); NaN propagates.

    Args:
      gate: `[...]`, or both halves packed along the last dim, `[..., 2 * f]` with the
        gate first (the order of Hugging Face's and llama.cpp's `gate_up` weights). The
        gradient of a packed one is made as one array too.
      up: `[...]`, the shape of gate; None if `gate` is packed.
      alpha: steepness of the sigmoid, finite.
      limit: bound of the gate from above and of |up|, positive; None for none.
      up_offset: added to `up` after its bound, finite.

    Returns:
      y: the shape of `up`; the dtype to which those of gate and up promote.

    Raises:
      TypeError: shapes differ, or the last dim of a packed `gate` is odd.
      ValueError: an option is not finite, or `limit` not positive.

    Example:
      >>> gate, up = jnp.array([1.0, -1.0]), jnp.array([2.0, 2.0])
      >>> jaxkern.swiglu(gate, up)
      Array([ 1.462, -0.538], dtype=float32)
      >>> jaxkern.swiglu(gate, up, alpha=1.702, limit=7.0, up_offset=1.0)  # GPT-OSS
      Array([ 2.537, -0.463], dtype=float32)
    """
    check_swiglu("swiglu", alpha, limit, up_offset)
    limit = None if limit is None else float(limit)
    options = dict(alpha=float(alpha), limit=limit, up_offset=float(up_offset))
    if up is None:
        split_packed(gate, "swiglu")  # refuses what has no halves
        return packed_swiglu_p(gate, **options)
    return swiglu_p(gate, up, **options)


def check_swiglu(op: str, alpha: float, limit: float | None, up_offset: float) -> None:
    for name, value in (("alpha", alpha), ("up_offset", up_offset)):
        if not math.isfinite(value):
            raise ValueError(f"{op}: `{name}` must be finite, got {value}.")
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(
            f"{op}: `limit` must be positive and finite, got {limit}. None means no "
            "bound."
        )


def split_packed(
    packed: Float[Array, "... 2*f"], op: str
) -> tuple[Float[Array, "... f"], Float[Array, "... f"]]:
    """(gate, up): the two halves of the last dim."""
    if packed.ndim == 0 or packed.shape[-1] % 2:
        raise TypeError(
            f"{op}: packed `gate` must have an even last dim, got shape "
            f"{packed.shape}. Give `up`, or pack gate and up along the last dim."
        )
    f = packed.shape[-1] // 2
    return packed[..., :f], packed[..., f:]


def swiglu_reference(
    gate: Float[Array, "..."],
    up: Float[Array, "..."],
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Float[Array, "..."]:
    z, u, *_ = bounded(gate, up, limit)
    if up_offset:  # adding 0 would lose the sign of -0
        u = u + up_offset
    gated = jax.nn.silu(z) if alpha == 1 else z * jax.nn.sigmoid(alpha * z)
    y = gated * u
    return y.astype(jnp.result_type(gate, up))


def swiglu_bwd_reference(
    gate: Float[Array, "..."],
    up: Float[Array, "..."],
    dy: Float[Array, "..."],
    *,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    z, u, *beyond = bounded(gate, up, limit)
    dy32 = at_least_f32(dy)
    steep = z if alpha == 1 else alpha * z
    s = jax.nn.sigmoid(steep)
    if up_offset:
        u = u + up_offset
    dgate = dy32 * u * s * (1 + steep * (1 - s))
    dup = dy32 * z * s
    if limit is not None:
        dgate, dup = (
            jnp.where(b, 0, d) for b, d in zip(beyond, (dgate, dup), strict=True)
        )
    return dgate.astype(gate.dtype), dup.astype(up.dtype)


def bounded(gate, up, limit):
    """Gate and up in float32 within their bounds, and where they were beyond them."""
    z, u = at_least_f32(gate), at_least_f32(up)
    if limit is None:
        return z, u
    z_beyond, u_beyond = z > limit, abs(u) > limit
    z = jnp.where(z_beyond, limit, z)  # min and max would halve the gradient at it
    u = jnp.where(u_beyond, jnp.where(u > 0, limit, -limit), u)
    return z, u, z_beyond, u_beyond


swiglu_p = kernel_primitive(swiglu_reference, bwd=swiglu_bwd_reference)


def packed_swiglu_reference(
    gate_up: Float[Array, "... f2"],
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Float[Array, "... f"]:
    gate, up = split_packed(gate_up, "packed_swiglu")
    return swiglu_reference(gate, up, alpha=alpha, limit=limit, up_offset=up_offset)


def packed_swiglu_bwd_reference(
    gate_up: Float[Array, "... f2"],
    dy: Float[Array, "... f"],
    *,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> Float[Array, "... f2"]:
    gate, up = split_packed(gate_up, "packed_swiglu")
    both = swiglu_bwd_reference(
        gate, up, dy, alpha=alpha, limit=limit, up_offset=up_offset
    )
    return jnp.concatenate(both, axis=-1)


packed_swiglu_p = kernel_primitive(
    packed_swiglu_reference,
    bwd=packed_swiglu_bwd_reference,
    # a part of a row has not both halves of its channels
    replicated=("f", "f2"),
)
