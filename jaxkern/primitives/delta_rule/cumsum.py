"""Running sums along one axis, exclusive or reversed too: y_i = sum_{j <= i} x_j."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def cumsum(
    x: Float[Array, "..."],
    *,
    axis: int = -1,
    exclusive: bool = False,
    reverse: bool = False,
) -> Float[Array, "..."]:
    """Running sums along one axis.

    | exclusive | reverse | y_i               |
    |-----------|---------|-------------------|
    | False     | False   | sum_{j <= i} x_j  |
    | True      | False   | sum_{j < i} x_j   |
    | False     | True    | sum_{j >= i} x_j  |
    | True      | True    | sum_{j > i} x_j   |

    The gradient is the same sum from the other end. Sums in float32 (float64 for a
    float64 `x`), one rounding to x.dtype. An exclusive sum never contains x_i
    itself, so an infinity there leaves it finite.

    Args:
      x: `[...]`, any float dtype, at least one dim. For integers take `jnp.cumsum`.
      axis: the dim to sum along.
      exclusive: leave x_i out of y_i.
      reverse: sum from the end.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: `x` is not an array of floats.

    Example:
      >>> x = jnp.array([1.0, 2.0, 3.0])
      >>> jaxkern.cumsum(x)
      Array([1., 3., 6.], dtype=float32)
      >>> jaxkern.cumsum(x, exclusive=True, reverse=True)
      Array([5., 3., 0.], dtype=float32)
    """
    axis = axis_within("cumsum", axis, x.ndim)
    y = cumsum_p(
        jnp.moveaxis(x, axis, -1), exclusive=bool(exclusive), reverse=bool(reverse)
    )
    return jnp.moveaxis(y, -1, axis)


def cumsum_reference(
    x: Float[Array, "... n"], *, exclusive: bool, reverse: bool
) -> Float[Array, "... n"]:
    x32 = at_least_f32(x)
    y = lax.cumsum(x32, axis=x.ndim - 1, reverse=reverse)
    if exclusive:  # one place on: y - x would cancel, and is NaN at an infinity
        shift = (-1, 1, 0) if reverse else (1, -1, 0)
        y = lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 0)] * (x.ndim - 1) + [shift])
    return y.astype(x.dtype)


def cumsum_bwd_reference(
    dy: Float[Array, "... n"], *, exclusive: bool, reverse: bool
) -> Float[Array, "... n"]:
    return cumsum_reference(dy, exclusive=exclusive, reverse=not reverse)


cumsum_p = kernel_primitive(
    cumsum_reference,
    bwd=cumsum_bwd_reference,
    linear=("x",),
    replicated=("n",),  # each sum runs over a part of n
)
