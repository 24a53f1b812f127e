"""Index of the largest element, the smallest such index on ties."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def argmax(
    x: Float[Array, "..."], *, axis: int = -1, nan_policy: str = "propagate"
) -> Int32[Array, "..."]:
    """Index of the largest element along one axis; the smallest such index on ties.

        index = min {i : x[i] = max(x)}

    -0.0 and 0.0 are a tie. The result has no gradient.

    Args:
      x: `[...]`, any float dtype, at least one dim.
      axis: the dim to search and to drop.
      nan_policy: "propagate": a NaN counts as the largest element, so the first one
        wins (`jnp.argmax`). "ignore": a NaN never wins; a row of NaN gives 0.

    Returns:
      index: int32, the shape of x without `axis`.

    Raises:
      ValueError: `nan_policy` is neither of the two, or x is empty along `axis`.

    Example:
      >>> jaxkern.argmax(jnp.array([[1.0, 3.0, 3.0], [0.0, jnp.nan, 1.0]]))
      Array([1, 1], dtype=int32)
    """
    if nan_policy not in ("propagate", "ignore"):
        raise ValueError(
            f"argmax: `nan_policy` must be 'propagate' or 'ignore', got {nan_policy!r}."
        )
    axis = axis_within("argmax", axis, x.ndim)
    return argmax_p(jnp.moveaxis(x, axis, -1), nan_policy=nan_policy)


def argmax_reference(
    x: Float[Array, "... v"], *, nan_policy: str
) -> Int32[Array, "..."]:
    if x.shape[-1] == 0:
        raise ValueError("argmax: a row of `x` is empty: it has no largest element.")
    is_nan = jnp.isnan(x)
    if nan_policy == "ignore":
        best = jnp.max(jnp.where(is_nan, -jnp.inf, x), axis=-1, keepdims=True)
        index = first_true(x == best)
        return jnp.where(index == x.shape[-1], 0, index)
    return first_true((x == jnp.max(x, axis=-1, keepdims=True)) | is_nan)


def first_true(hit: Bool[Array, "... v"]) -> Int32[Array, "..."]:
    """Smallest index with `hit`, v if there is none.

    Two plain reductions (a maximum, then this) run on vector units, where XLA's
    reduction over (value, index) pairs does not: 3 to 4 times faster on a CPU.
    """
    v = hit.shape[-1]
    index = lax.broadcasted_iota(jnp.int32, hit.shape, hit.ndim - 1)
    return jnp.min(jnp.where(hit, index, v), axis=-1)


argmax_p = kernel_primitive(argmax_reference, replicated=("v",))
