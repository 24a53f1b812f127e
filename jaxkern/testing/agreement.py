"""Whether a kernel computes what the reference does, up to rounding."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TENSOR_FLOAT = 5e-3  # a sum of many terms in TF32, which GPUs multiply float32 in
FLOAT64 = 1e-9
AS_FAR = 4  # times the reference's own error
FEW = 1e-3  # share of integers that near ties may change: ids, codes


def disagreement(
    found: Sequence[jax.Array],
    expected: Sequence[jax.Array],
    dtypes: Sequence[Any],
    exact: Callable[[], Sequence[jax.Array]] | None = None,
) -> str | None:
    """How the results differ from the expected ones by more than rounding, or None.

    A float may be off by `bound` times the sum of its size and the root mean square of
    its array; what is not finite must be the same. Of integers one in 1000 may differ.

    Args:
      found, expected: results of two implementations.
      dtypes: in which the call computes: of its operands, and options such as a
        `compute_dtype`.
      exact: gives the results in float64. Where terms cancel nothing else tells errors
        from rounding; then the found ones may have AS_FAR times the expected ones'.
    """
    for k, (y, e) in enumerate(zip(found, expected, strict=True)):
        if (y.shape, y.dtype) != (e.shape, e.dtype):
            return f"result {k} is {jax.typeof(y)}, the reference's {jax.typeof(e)}"
        is_float = jnp.issubdtype(e.dtype, jnp.floating)
        most = bound([e.dtype, *dtypes]) if is_float else FEW
        off = float(worst(y, e) if is_float else share_changed(y, e))
        if off <= most:
            continue
        if is_float and exact is not None and is_as_exact(y, e, exact()[k]):
            continue
        what = "is off by" if is_float else "changes a share of"
        return f"result {k} {what} {off:.2g}, allowed is {most:.2g}"
    return None


def is_as_exact(y: jax.Array, e: jax.Array, exact: jax.Array) -> bool:
    with jax.enable_x64(True):
        own, its = (float(jnp.max(errors(x, exact), initial=0)) for x in (y, e))
    return own <= AS_FAR * its < math.inf


def exact_results(reference: Callable, operands: Sequence[jax.Array]) -> list:
    """The reference's results on its operands in float64."""
    with jax.enable_x64(True):
        wide = [
            x.astype(jnp.float64)
            if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
            else x
            for x in operands
        ]
        return list(jax.jit(reference)(*wide))


def bound(dtypes: Sequence[Any]) -> float:
    """Four roundings of the coarsest float, in float32 at least those of TF32."""
    floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    if all(jnp.finfo(d).bits == 64 for d in floats):
        return FLOAT64
    return max(TENSOR_FLOAT, *(4 * float(jnp.finfo(d).eps) for d in floats))


@jax.jit
def worst(y: jax.Array, e: jax.Array) -> jax.Array:
    """The largest error, relative to an element's size and the array's together."""
    size = jnp.where(jnp.isfinite(e), jnp.abs(e), 0)
    size = size.astype(jnp.promote_types(e.dtype, jnp.float32))
    largest = jnp.max(size, initial=0)
    largest = jnp.where(largest > 0, largest, 1)
    scale = largest * jnp.sqrt(jnp.sum((size / largest) ** 2) / max(e.size, 1))
    error = errors(y, e)
    return jnp.max(jnp.where(error > 0, error / (size + scale), 0), initial=0)


def errors(y: jax.Array, e: jax.Array) -> jax.Array:
    """Of each element; infinite where one of two is not finite and they differ.

    A NaN would be lost: XLA's maximum on CPUs passes over it.
    """
    wide = jnp.promote_types(jnp.promote_types(y.dtype, e.dtype), jnp.float32)
    y, e = y.astype(wide), e.astype(wide)
    same = (y == e) | (jnp.isnan(y) & jnp.isnan(e))
    finite = jnp.isfinite(y) & jnp.isfinite(e)
    return jnp.where(same, 0, jnp.where(finite, jnp.abs(y - e), jnp.inf))


@jax.jit
def share_changed(y: jax.Array, e: jax.Array) -> jax.Array:
    return jnp.sum(y != e) / max(e.size, 1)


def dtypes_of(arrays: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """Of a call's operands, and those that its options name.

    Not of operands of 8 bits: every implementation decodes the same numbers from them.
    """
    scalars = (np.dtype, type(jnp.float32))
    named = [jnp.dtype(v) for v in options.values() if isinstance(v, scalars)]
    return [*(x.dtype for x in arrays if x.dtype.itemsize > 1), *named]
