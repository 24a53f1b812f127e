"""x w^T of dense weights, in the dtype of its sums: what `linear` means."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxkern.primitives.index.embedding import explicit_spec


def result_dtype(op: str, preferred: DTypeLike | None, default: Any) -> jnp.dtype:
    """The dtype to which the sums of a product are rounded."""
    try:
        dtype = jnp.dtype(default if preferred is None else preferred)
    except TypeError:
        raise TypeError(
            f"{op}: `preferred_element_type` must be a float dtype, got {preferred!r}."
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{op}: `preferred_element_type` must be a float dtype, got {dtype.name}."
        )
    return dtype


def product(x, w, compute_dtype, precision, accum):
    """The sums of products, not yet rounded."""
    promoted = jnp.promote_types(x.dtype, w.dtype)
    dtype = promoted if compute_dtype is None else compute_dtype
    if compute_dtype is None:
        accum = jnp.promote_types(promoted, accum)
    # where d is cut, the sum over it says how its result is
    cuts = *jax.typeof(x).sharding.spec[:-1], jax.typeof(w).sharding.spec[0]
    return lax.dot_general(
        x.astype(dtype),
        w.astype(dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=accum,
        out_sharding=explicit_spec(*cuts),
    )
