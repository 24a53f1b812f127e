"""RMS normalisation where a block branches off: rms_norm(x) beside x itself."""

from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.rms_norm import (
    rms_norm_bwd_reference,
    rms_norm_fwd_reference,
)


@check_arguments
def branched_rms_norm(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Float[Array, "... d"], Float[Array, "... d"]]:
    """`rms_norm` and its operand, for `x + block(rms_norm(x))`.

        y, x = x / sqrt(mean(x**2) + eps) * (weight + offset), x

    The gradient of x is the sum of both paths. Through this function that sum is made
    where the gradient of the norm is, in float32, and rounded once; two uses of x would
    add two arrays in a pass of their own. https://arxiv.org/abs/1910.07467

    Args:
      x: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale.
      eps, offset: see `rms_norm`.

    Returns:
      y: `[..., d]`, dtype of x.
      x: as it came.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: eps is negative or not finite.

    Example:
      >>> jaxkern.branched_rms_norm(jnp.array([[3.0, 4.0]]))
      (Array([[0.849, 1.131]], dtype=float32), Array([[3., 4.]], dtype=float32))
    """
    return branched_rms_norm_p(x, weight, eps=eps, offset=offset)


def branched_rms_norm_fwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... d"], Float[Array, "... 1"]]:
    y, rstd = rms_norm_fwd_reference(x, weight, None, eps=eps, offset=offset)
    return y, x, rstd


branched_rms_norm_reference = without_residuals(branched_rms_norm_fwd_reference, 2)


def branched_rms_norm_bwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    rstd: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    dbeside: Float[Array, "... d"],
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, " d"] | None]:
    x32 = at_least_f32(x)
    dx, dweight, _ = rms_norm_bwd_reference(
        x32, weight, None, rstd, dy, eps=eps, offset=offset
    )
    return (dx + at_least_f32(dbeside)).astype(x.dtype), dweight


branched_rms_norm_p = kernel_primitive(
    branched_rms_norm_reference,
    fwd=branched_rms_norm_fwd_reference,
    bwd=branched_rms_norm_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
