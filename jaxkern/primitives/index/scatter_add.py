"""Scatter-add: y[..., r, :] = x[..., r, :] + the sum of the updates with index r."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.index.check_indices import check_indices
from jaxkern.primitives.index.embedding import nearest_rows
from jaxkern.primitives.index.gather import gather_reference
from jaxkern.primitives.index.rows import add_rows, rows_back, rows_first
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def scatter_add(
    x: Float[Array, "..."],
    indices: Integer[Array, "..."],
    updates: Float[Array, "..."],
    *,
    axis: int = 0,
    out_of_bounds: str = "drop",
) -> Float[Array, "..."]:
    """Adds slices to x along one axis, by their numbers: the transpose of `gather`.

        y[o, r, t] = x[o, r, t] + sum of updates[o, i, t] over all i with indices[i] = r

    with o the dims before `axis` and t those after it. Deterministic on every platform:
    the updates are sorted by index, stably, and summed by a tree in float32 that
    depends on the indices alone; the sum is rounded once. (XLA's scatter, which
    `x.at[indices].add` is, adds in any order on a GPU.) The tree reads and
    writes all updates log2 of their number times; on a CPU, 4096 rows of 512 into 32000
    take 1.4 times as long as XLA's scatter.

    An index outside the axis, negative ones included, is not an error unless asked for:
    traced values cannot raise.

    Args:
      x: `[*o, v, *t]`, any float dtype.
      indices: any integer dtype and shape.
      updates: `[*o, *indices.shape, *t]`, any float dtype.
      axis: the dim that the indices number, v.
      out_of_bounds: where an update with an index outside [0, v) goes: "drop", nowhere
        and without a gradient; "clip", to the nearest slice; "checked", an error, see
        `check_indices`.

    Returns:
      y: shape of x; the dtype to which those of x and updates promote.

    Raises:
      TypeError: shapes do not fit.
      ValueError: `out_of_bounds` is none of these.

    Example:
      >>> x, updates = jnp.zeros(3), jnp.array([1.0, 2.0, 4.0])
      >>> jaxkern.scatter_add(x, jnp.array([0, 2, 2]), updates)
      Array([1., 0., 6.], dtype=float32)
    """
    if out_of_bounds not in ("drop", "clip", "checked"):
        raise ValueError(
            "scatter_add: `out_of_bounds` must be 'drop', 'clip' or 'checked', got "
            f"{out_of_bounds!r}."
        )
    axis = axis_within("scatter_add", axis, x.ndim)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if updates.shape != (*before, *indices.shape, *after):
        raise TypeError(
            f"scatter_add: `updates` must have shape "
            f"{(*before, *indices.shape, *after)} for x {x.shape}, indices "
            f"{indices.shape} and axis {axis}, got {updates.shape}."
        )
    if out_of_bounds == "checked":
        check_indices(indices, x.shape[axis], name="scatter_add")
    dtype = jnp.result_type(x, updates)
    updates = updates.reshape(*before, indices.size, *after)
    y = scatter_add_p(
        rows_first(x.astype(dtype), axis),
        indices.reshape(-1),
        rows_first(updates.astype(dtype), axis),
        clip=out_of_bounds == "clip",
    )
    return rows_back(y, axis, x.ndim)


def scatter_add_reference(
    x: Float[Array, "... v d"],
    indices: Integer[Array, " j"],
    updates: Float[Array, "... j d"],
    *,
    clip: bool,
) -> Float[Array, "... v d"]:
    v = x.shape[-2]
    if v == 0:
        return x
    rows, inside = nearest_rows(indices, v)
    added = at_least_f32(updates)
    if not clip:
        added = jnp.where(inside[:, None], added, 0)
    return add_rows(at_least_f32(x), rows, added).astype(x.dtype)


def scatter_add_bwd_reference(
    indices: Integer[Array, " j"], dy: Float[Array, "... v d"], *, clip: bool
) -> tuple[Float[Array, "... v d"], Float[Array, "... j d"]]:
    return dy, gather_reference(dy, indices, clip=clip)


scatter_add_p = kernel_primitive(
    scatter_add_reference,
    bwd=scatter_add_bwd_reference,
    linear=("x", "updates"),
    replicated=("v", "j"),  # any update may go to any row, and x is added once
)
