"""SwiGLU: y = silu(gate) * up, silu(z) = z * sigmoid(z)  (https://arxiv.org/abs/2002.05202)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def swiglu(
    gate: Float[Array, "..."], up: Float[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Gated SiLU of a transformer's feed-forward block (https://arxiv.org/abs/2002.05202).

        y = silu(gate) * up,    silu(z) = z / (1 + exp(-z))

    Computed in float32 and rounded once. Only `gate` and `up` are kept for the backward
    pass. As in other libraries silu(-inf) is NaN (its limit is 0); NaN propagates.

    Args:
      gate: `[...]`, or both halves packed along the last dim, `[..., 2 * f]` with the
        gate first (the order of Hugging Face's and llama.cpp's `gate_up` weights).
      up: `[...]`, the shape of gate; None if `gate` is packed.

    Returns:
      y: the shape of `up`; the dtype to which those of gate and up promote.

    Raises:
      TypeError: shapes differ, or the last dim of a packed `gate` is odd.
    """
    if up is None:
        gate, up = split_packed(gate, "swiglu")
    return swiglu_p(gate, up)


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
    gate: Float[Array, "..."], up: Float[Array, "..."]
) -> Float[Array, "..."]:
    y = jax.nn.silu(at_least_f32(gate)) * at_least_f32(up)
    return y.astype(jnp.result_type(gate, up))


def swiglu_bwd_reference(
    gate: Float[Array, "..."], up: Float[Array, "..."], dy: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    z, dy32 = at_least_f32(gate), at_least_f32(dy)
    s = jax.nn.sigmoid(z)
    dgate = dy32 * at_least_f32(up) * s * (1 + z * (1 - s))
    return dgate.astype(gate.dtype), (dy32 * z * s).astype(up.dtype)


swiglu_p = kernel_primitive(swiglu_reference, bwd=swiglu_bwd_reference)
