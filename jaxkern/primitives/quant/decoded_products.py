"""What every format computes with its decoded weights: products, row lookups.

A format brings its arrays, all with the same leading dims, and `decode`, which gives
the weights `[..., d]` of any part of them in a float dtype.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.kernel_primitive import at_least_f32


def decoded_product(
    x: Float[Array, "... n"],
    decode: Callable[[jnp.dtype], Float[Array, "f d"]],
    axis: int,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... m"]:
    """Contracts the last dim of `x` with the given axis of the decoded `[f, d]`.

    Operands in `compute_dtype`, or exact if it is None; sums in float32 or wider; one
    rounding to x.dtype.
    """
    sum_dtype = at_least_f32(x).dtype
    dtype = compute_dtype or sum_dtype
    y = lax.dot_general(
        x.astype(dtype),
        decode(dtype),
        (((x.ndim - 1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,  # float32 means float32, not tf32
        preferred_element_type=sum_dtype,
    )
    return y.astype(x.dtype)


def decoded_rows(
    ids: Integer[Array, "..."],
    arrays: Sequence[Array],
    decode: Callable[..., Float[Array, "... d"]],
) -> Float[Array, "... d"]:
    """Rows `ids` of `decode(*arrays)`, 0 where an id is negative or >= v.

    The rows are gathered packed and decoded after.
    """
    v = arrays[0].shape[0]
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))  # int8 cannot hold v
    inside = (ids >= 0) & (ids < v)
    sharding = jax.typeof(ids).sharding
    spec = P(*sharding.spec, None) if sharding.mesh.explicit_axes else None

    def gathered(a: Array) -> Array:
        if v == 0:  # nothing to gather from
            a = jnp.zeros((1, *a.shape[1:]), a.dtype)
        at = a.at[jnp.where(inside, ids, 0)]
        return at.get(mode="clip", out_sharding=spec)

    return jnp.where(inside[..., None], decode(*map(gathered, arrays)), 0)
