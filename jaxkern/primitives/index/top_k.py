"""The k largest elements in descending order, with their indices."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def top_k(
    x: Float[Array, "..."],
    k: int,
    *,
    axis: int = -1,
    lengths: Int[Array, "..."] | int | None = None,
) -> tuple[Float[Array, "..."], Int32[Array, "..."]]:
    """The k largest elements along one axis, in descending order, and their indices.

    Of equal elements, -0.0 and 0.0 among them, the smaller index comes first. NaN
    counts as larger than inf, whatever its sign bit (`lax.top_k` puts a NaN with the
    sign bit last, and 0.0 before -0.0). The gradient of `values` goes to the places
    that were picked; `indices` have none.

    With k the size of the axis, `indices` is the stable descending argsort.

    With `lengths` a row ends after as many elements, whatever lies behind: the keys
    that a query of sparse attention may choose from, or the rest of a padded batch.
    Where fewer than k are left, the places behind them have the value -inf and the
    index -1, for which `embedding` reads zeros.

        top_k(scores, 2048, lengths=jnp.arange(1, t + 1))  # scores: [t, t], causal

    Args:
      x: `[...]`, any float dtype, at least one dim.
      k: how many, at most the size of x along `axis`. 0 gives empty results.
      axis: the dim to search; its size becomes k.
      lengths: how many elements of each row count, from its beginning: the shape of x
        without `axis`, or a number for all rows; may be traced. None: all.

    Returns:
      values: dtype of x.
      indices: int32, same shape.

    Raises:
      TypeError: `lengths` has another shape.
      ValueError: `k` is not within the size of x along `axis`.

    Example:
      >>> values, indices = jaxkern.top_k(jnp.array([1.0, 3.0, 2.0, 3.0]), 3)
      >>> values, indices
      (Array([3., 3., 2.], dtype=float32), Array([1, 3, 2], dtype=int32))
    """
    axis = axis_within("top_k", axis, x.ndim)
    rows = jnp.moveaxis(x, axis, -1)
    if lengths is None:
        values, indices = top_k_p(rows, k=int(k))
    else:
        count = row_lengths(lengths, rows.shape[:-1])
        # the padding loses against every element: equal ones stand before it
        inside = jnp.arange(rows.shape[-1]) < count
        values, indices = top_k_p(jnp.where(inside, rows, -jnp.inf), k=int(k))
        indices = jnp.where(jnp.arange(indices.shape[-1]) < count, indices, -1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)


def row_lengths(
    lengths: Int[Array, "..."] | int, rows: tuple[int, ...]
) -> Int[Array, "... 1"]:
    """`lengths` beside the elements of each row."""
    lengths = jnp.asarray(lengths)
    if lengths.shape not in ((), rows):
        raise TypeError(
            f"top_k: `lengths` must be a number or have one for each row, {rows}, got "
            f"shape {lengths.shape}."
        )
    return lengths[..., None]


def top_k_reference(
    x: Float[Array, "... v"], *, k: int
) -> tuple[Float[Array, "... top"], Int32[Array, "... top"]]:
    if not 0 <= k <= x.shape[-1]:
        raise ValueError(
            f"top_k: `k` must lie between 0 and the {x.shape[-1]} elements of a row of "
            f"`x`, got {k}."
        )
    # lax.top_k puts 0.0 before -0.0, and a NaN last if its sign bit is set, as on x86
    rank = jnp.where(jnp.isnan(x), jnp.nan, jnp.where(x == 0, 0, x))
    _, indices = lax.top_k(lax.stop_gradient(rank), k)
    return jnp.take_along_axis(x, indices, axis=-1, mode="clip"), indices


top_k_p = kernel_primitive(top_k_reference, replicated=("v",))
