"""An index out of bounds as an error, under `jax.experimental.checkify`."""

import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Integer

from jaxkern.primitives.check_arguments import check_arguments

OUTSIDE = ("zeros", "clip", "checked")  # what reading outside an axis may mean


@check_arguments
def check_indices(
    indices: Integer[Array, "..."], size: int, *, name: str = "check_indices"
) -> None:
    """Raises unless 0 <= indices < size, also inside `jit`.

    Traced values cannot raise by themselves: functionalise the whole function,

        errors, y = jax.jit(checkify.checkify(f))(x)
        errors.throw()

    (`from jax.experimental import checkify`). A traced call without `checkify` is
    refused by JAX at once; concrete indices raise where they are. Of several wrong
    indices the smallest is named, or else the largest. `gather`, `take_along_axis`,
    `scatter_add` and `embedding` do this with out_of_bounds="checked"; call it before
    an operator that has no such option, as `jax.nn.one_hot`.

    Args:
      indices: any integer dtype and shape.
      size: how many slices the axis has, static.
      name: of the caller, with which the message begins.

    Returns:
      None.

    Raises:
      TypeError: indices are no integer array.
      checkify.JaxRuntimeError: an index is out of bounds, from `errors.throw()`.

    Example:
      >>> from jax.experimental import checkify
      >>> f = jax.jit(checkify.checkify(lambda i: jaxkern.check_indices(i, 4)))
      >>> errors, _ = f(jnp.array([0, 9]))
      >>> errors.get().splitlines()[0]
      'check_indices: index 9 is out of bounds for an axis of size 4. (`check` failed)'
    """
    if not indices.size:
        return
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)  # the size may not fit their dtype
    low, high = jnp.min(indices), jnp.max(indices)
    wrong = jnp.where(low < 0, low, high)
    checkify.check(
        (low >= 0) & (high < size),
        name + f": index {{wrong}} is out of bounds for an axis of size {size}.",
        wrong=wrong,
    )
