"""y = rms_norm(x) * weight * scale, element by element  (https://arxiv.org/abs/1910.07467)."""

from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.rms_norm import (
    rms_norm_bwd_reference,
    rms_norm_fwd_reference,
)


@check_arguments
def rms_norm_mul(
    x: Float[Array, "... d"],
    scale: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Float[Array, "... d"]:
    """Normalises x and multiplies it by a tensor of its own shape.

        y = x / sqrt(mean(x**2) + eps) * (weight + offset) * scale

    Computed in float32 (float64 for float64 operands) and rounded once. With a gate
    that goes through SiLU it is `gated_rms_norm`.

    Source: https://arxiv.org/abs/1910.07467.

    Args:
      x: `[..., d]`, any float dtype.
      scale: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale of the norm.
      eps: added to the mean square, in units of x**2.
      offset: added to `weight`; 1.0 for Gemma 2 and 3, which store weight - 1.

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: eps is negative or not finite.

    Example:
      >>> x, scale = jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 10.0]])
      >>> jaxkern.rms_norm_mul(x, scale)
      Array([[ 0.849, 11.314]], dtype=float32)
    """
    return rms_norm_mul_p(x, scale, weight, eps=eps, offset=offset)


def rms_norm_mul_fwd_reference(
    x: Float[Array, "... d"],
    scale: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... 1"]]:
    normed, rstd = rms_norm_fwd_reference(
        at_least_f32(x), weight, None, eps=eps, offset=offset
    )
    return (normed * at_least_f32(scale)).astype(x.dtype), rstd


rms_norm_mul_reference = without_residuals(rms_norm_mul_fwd_reference)


def rms_norm_mul_bwd_reference(
    x: Float[Array, "... d"],
    scale: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    rstd: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... d"], Float[Array, " d"] | None]:
    dy32 = at_least_f32(dy)
    dx, dweight, _ = rms_norm_bwd_reference(
        x, weight, None, rstd, dy32 * at_least_f32(scale), eps=eps, offset=offset
    )
    normed = at_least_f32(x) * rstd
    if weight is not None:
        normed = normed * (at_least_f32(weight) + offset)
    return dx, (dy32 * normed).astype(scale.dtype), dweight


rms_norm_mul_p = kernel_primitive(
    rms_norm_mul_reference,
    fwd=rms_norm_mul_fwd_reference,
    bwd=rms_norm_mul_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
