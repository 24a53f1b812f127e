"""Gather: y[..., i, :] = x[..., indices[i], :]; its gradient adds repeated indices."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.index.check_indices import OUTSIDE, check_indices
from jaxkern.primitives.index.embedding import nearest_rows
from jaxkern.primitives.index.rows import (
    add_rows,
    rows_back,
    rows_first,
    take_rows,
)
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def gather(
    x: Float[Array, "..."],
    indices: Integer[Array, "..."],
    *,
    axis: int = 0,
    out_of_bounds: str = "zeros",
) -> Float[Array, "..."]:
    """Slices of x along one axis, by their numbers.

        y[o, i, t] = x[o, indices[i], t],    dx[o, r, t] = sum of dy[o, i, t] over all i
                                                           with indices[i] = r

    with o the dims before `axis` and t those after it. The gradient adds what repeated
    indices bring, in float32, in the same order in every run and rounded once: it is
    `scatter_add`. For the rows of a table `embedding` is the shorter call,
    with a gradient that XLA adds in any order on a GPU.

    An index outside the axis, negative ones included, is not an error unless asked for:
    traced values cannot raise. (`jnp.take` gives NaN there and counts -1 from the end.)

    Args:
      x: `[*o, v, *t]`, any float dtype.
      indices: any integer dtype and shape.
      axis: the dim that the indices number, v.
      out_of_bounds: what an index outside [0, v) reads: "zeros", without a gradient;
        "clip", the nearest slice; "checked", an error, see `check_indices`.

    Returns:
      y: `[*o, *indices.shape, *t]`, dtype of x. Zeros if v is 0.

    Raises:
      ValueError: `out_of_bounds` is none of these.

    Example:
      >>> x = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
      >>> jaxkern.gather(x, jnp.array([2, 0]), axis=1)
      Array([[3., 1.],
             [6., 4.]], dtype=float32)
    """
    if out_of_bounds not in OUTSIDE:
        raise ValueError(
            f"gather: `out_of_bounds` must be one of {OUTSIDE}, got {out_of_bounds!r}."
        )
    axis = axis_within("gather", axis, x.ndim)
    if out_of_bounds == "checked":
        check_indices(indices, x.shape[axis], name="gather")
    y = gather_p(rows_first(x, axis), indices.reshape(-1), clip=out_of_bounds == "clip")
    y = rows_back(y, axis, x.ndim)
    return y.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def gather_reference(
    x: Float[Array, "... v d"], indices: Integer[Array, " j"], *, clip: bool
) -> Float[Array, "... j d"]:
    *lead, v, d = x.shape
    if v == 0:
        return jnp.zeros((*lead, indices.size, d), x.dtype)
    rows, inside = nearest_rows(indices, v)
    y = take_rows(x, rows)
    return y if clip else jnp.where(inside[:, None], y, 0)


def gather_bwd_reference(
    x: Float[Array, "... v d"],
    indices: Integer[Array, " j"],
    dy: Float[Array, "... j d"],
    *,
    clip: bool,
) -> Float[Array, "... v d"]:
    v = x.shape[-2]
    if v == 0:
        return jnp.zeros_like(x)
    rows, inside = nearest_rows(indices, v)
    dy32 = at_least_f32(dy)
    if not clip:
        dy32 = jnp.where(inside[:, None], dy32, 0)
    zeros = jnp.zeros_like(x, dy32.dtype)
    return add_rows(zeros, rows, dy32).astype(x.dtype)


gather_p = kernel_primitive(
    gather_reference,
    bwd=gather_bwd_reference,
    replicated=("v",),  # any index may ask for any row
)
