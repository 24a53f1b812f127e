"""Indices that sort a row, stably: of equal elements the smaller index comes first."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.index.embedding import explicit_spec
from jaxkern.primitives.index.ordered_bits import ordered_bits
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def argsort(
    x: Float[Array, "..."],
    *,
    axis: int = -1,
    descending: bool = False,
    nan_policy: str = "propagate",
) -> Int32[Array, "..."]:
    """Indices that sort x along one axis, stably.

        x[indices[0]] <= x[indices[1]] <= ...    (>= with descending)

    Of equal elements, -0.0 and 0.0 among them, the smaller index comes first, also with
    descending: it is not the ascending order reversed. Infinities are elements like
    others. The result has no gradient; `take_along_axis(x, indices)` are the sorted
    elements, with one.

    Args:
      x: `[...]`, any float dtype, at least one dim.
      axis: the dim to sort.
      descending: largest first.
      nan_policy: "propagate": NaN counts as larger than inf, as in `jnp.argsort` and
        `top_k`. "ignore": NaN comes last, also with descending.

    Returns:
      indices: int32, shape of x.

    Raises:
      ValueError: `nan_policy` is neither of the two.

    Example:
      >>> x = jnp.array([1.0, 3.0, 3.0, 2.0])
      >>> order = jaxkern.argsort(x, descending=True)
      >>> order, jaxkern.take_along_axis(x, order)
      (Array([1, 2, 3, 0], dtype=int32), Array([3., 3., 2., 1.], dtype=float32))
    """
    if nan_policy not in ("propagate", "ignore"):
        raise ValueError(
            f"argsort: `nan_policy` must be 'propagate' or 'ignore', got "
            f"{nan_policy!r}."
        )
    axis = axis_within("argsort", axis, x.ndim)
    indices = argsort_p(
        jnp.moveaxis(x, axis, -1), descending=bool(descending), nan_policy=nan_policy
    )
    return jnp.moveaxis(indices, -1, axis)


def argsort_reference(
    x: Float[Array, "... v"], *, descending: bool, nan_policy: str
) -> Int32[Array, "... v"]:
    # one unsigned key: XLA sorts pairs by radix on a GPU where the key is unsigned
    is_nan = jnp.isnan(x)
    rank = lax.stop_gradient(jnp.where(is_nan | (x == 0), 0, x))
    bits = ordered_bits(rank)
    bits = bits ^ jnp.iinfo(bits.dtype).min  # the sign: unsigned, it comes last
    key = lax.bitcast_convert_type(bits, f"u{bits.dtype}")
    key = ~key if descending else key
    first, last = jnp.zeros_like(key), ~jnp.zeros_like(key)
    nan_first = descending and nan_policy == "propagate"
    key = jnp.where(is_nan, first if nan_first else last, key)
    spec = explicit_spec(*jax.typeof(x).sharding.spec)
    index = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1, out_sharding=spec)
    return lax.sort((key, index), dimension=-1, is_stable=True, num_keys=1)[1]


argsort_p = kernel_primitive(argsort_reference, replicated=("v",))
