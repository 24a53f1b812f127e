"""GeGLU: y = gelu(gate) * up  (https://arxiv.org/abs/2002.05202, https://arxiv.org/abs/1606.08415)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.activation.gelu import gelu_factor
from jaxkern.primitives.activation.swiglu import split_packed
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def geglu(
    gate: Float[Array, "..."],
    up: Float[Array, "..."] | None = None,
    *,
    approximate: str = "tanh",
) -> Float[Array, "..."]:
    """Gated GELU of a transformer's feed-forward block (https://arxiv.org/abs/2002.05202).

        y = gelu(gate) * up
        "none":  gelu(z) = z * Phi(z),  Phi the normal distribution function
        "tanh":  gelu(z) = z/2 * (1 + tanh(sqrt(2/pi) * (z + 0.044715 * z**3)))

    Computed in float32 and rounded once. Only `gate` and `up` are kept for the backward
    pass. The factor beside z is evaluated without cancellation, so that negative z keep
    their relative accuracy where `1 + tanh` would lose it. gelu(-inf) is NaN, as in
    `jax.nn.gelu`; NaN propagates.

    Args:
      gate: `[...]`, or both halves packed along the last dim, `[..., 2 * f]` with the
        gate first.
      up: `[...]`, the shape of gate; None if `gate` is packed.
      approximate: "tanh" (Gemma) or "none". PyTorch's names; `jax.nn.gelu` has a bool.

    Returns:
      y: the shape of `up`; the dtype to which those of gate and up promote.

    Raises:
      TypeError: shapes differ, or the last dim of a packed `gate` is odd.
      ValueError: `approximate` is neither of the two.

    Example:
      >>> gate, up = jnp.array([1.0, -1.0]), jnp.array([2.0, 2.0])
      >>> jaxkern.geglu(gate, up)
      Array([ 1.682, -0.318], dtype=float32)
      >>> jaxkern.geglu(jnp.array([1.0, -1.0, 2.0, 2.0]))  # packed
      Array([ 1.682, -0.318], dtype=float32)
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(
            f"geglu: `approximate` must be 'tanh' or 'none', got {approximate!r}."
        )
    if up is None:
        gate, up = split_packed(gate, "geglu")
    return geglu_p(gate, up, approximate=approximate)


def geglu_reference(
    gate: Float[Array, "..."], up: Float[Array, "..."], *, approximate: str
) -> Float[Array, "..."]:
    z = at_least_f32(gate)
    y = z * gelu_factor(z, approximate)[0] * at_least_f32(up)
    return y.astype(jnp.result_type(gate, up))


def geglu_bwd_reference(
    gate: Float[Array, "..."],
    up: Float[Array, "..."],
    dy: Float[Array, "..."],
    *,
    approximate: str,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    z, dy32 = at_least_f32(gate), at_least_f32(dy)
    factor, slope = gelu_factor(z, approximate)
    dgate = dy32 * at_least_f32(up) * (factor + z * slope)
    return dgate.astype(gate.dtype), (dy32 * z * factor).astype(up.dtype)


geglu_p = kernel_primitive(geglu_reference, bwd=geglu_bwd_reference)
