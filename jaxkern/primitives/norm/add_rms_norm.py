"""y = rms_norm(x + residual), and the sum  (https://arxiv.org/abs/1910.07467)."""

from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.rms_norm import (
    rms_norm_bwd_reference,
    rms_norm_fwd_reference,
)


@check_arguments
def add_rms_norm(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    bias: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Float[Array, "... d"], Float[Array, "... d"]]:
    """Adds a residual and normalises the sum, the seam between two blocks of a model.

        total = x + residual
        y = total / sqrt(mean(total**2) + eps) * (weight + offset) + bias

    The sum stays in float32 (float64 for float64 operands) until the norm is done; each
    result is rounded once. An add in bfloat16 followed by `rms_norm` rounds the sum
    first, so it differs by that rounding.

    Source: https://arxiv.org/abs/1910.07467.

    Args:
      x: `[..., d]`, any float dtype.
      residual: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale.
      bias: `[d]`, or None for no shift.
      eps: added to the mean square, in units of x**2.
      offset: added to `weight`; 1.0 for Gemma, whose checkpoints store weight - 1.

    Returns:
      y: `[..., d]`, dtype of x.
      total: `[..., d]`, dtype of residual.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: eps is negative or not finite.

    Example:
      >>> x, residual = jnp.array([[1.0, 2.0]]), jnp.array([[2.0, 2.0]])
      >>> y, total = jaxkern.add_rms_norm(x, residual)
      >>> y, total
      (Array([[0.849, 1.131]], dtype=float32), Array([[3., 4.]], dtype=float32))
    """
    return add_rms_norm_p(x, residual, weight, bias, eps=eps, offset=offset)


def add_rms_norm_fwd_reference(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... d"], Float[Array, "... 1"]]:
    total = at_least_f32(x) + at_least_f32(residual)
    y, rstd = rms_norm_fwd_reference(total, weight, bias, eps=eps, offset=offset)
    return y.astype(x.dtype), total.astype(residual.dtype), rstd


add_rms_norm_reference = without_residuals(add_rms_norm_fwd_reference, 2)


def add_rms_norm_bwd_reference(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    rstd: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    dtotal: Float[Array, "... d"],
    *,
    eps: float,
    offset: float,
) -> tuple[
    Float[Array, "... d"],
    Float[Array, "... d"],
    Float[Array, " d"] | None,
    Float[Array, " d"] | None,
]:
    total = at_least_f32(x) + at_least_f32(residual)
    dsum, dweight, dbias = rms_norm_bwd_reference(
        total, weight, bias, rstd, dy, eps=eps, offset=offset
    )
    dsum = dsum + at_least_f32(dtotal)
    return dsum.astype(x.dtype), dsum.astype(residual.dtype), dweight, dbias


add_rms_norm_p = kernel_primitive(
    add_rms_norm_reference,
    fwd=add_rms_norm_fwd_reference,
    bwd=add_rms_norm_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
