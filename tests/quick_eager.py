"""What only moves or widens few numbers, outside `jit`, without XLA.

XLA compiles each shape of each such call anew, in 25 milliseconds, which was a sixth of
the time of operators' tests: they have operands and results of thousands of shapes.
NumPy gives the same bits at once. Arithmetic stays XLA's.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

LARGEST = 1 << 20  # elements
quietly = np.errstate(all="ignore")  # NaN and infinities are results, as XLA has it
# By kinds of NumPy: what rounds once, to the nearest, or is exact.
WIDTHS = {jnp.dtype(d): d for d in (jnp.bfloat16, np.float16, np.float32, np.float64)}


def convert(x: np.ndarray, *, new_dtype: Any, **_: Any) -> np.ndarray | None:
    """None where NumPy may round otherwise: XLA saturates, and rounds some twice."""
    old, new = x.dtype, jnp.dtype(new_dtype)
    integers = "bui"
    exact = old == new or (old.kind in integers and new in (np.float32, np.float64))
    whole = old.kind in integers and new.kind in integers and new.kind != "b"
    floats = {old, new} <= set(WIDTHS)
    narrows = new.itemsize < old.itemsize or {old.name, new.name} == {
        "bfloat16",
        "float16",
    }
    once = floats and (not narrows or (old == np.float32 and new.itemsize == 2))
    return x.astype(new) if exact or whole or once else None


def broadcast(x: np.ndarray, *, shape: tuple, broadcast_dimensions: tuple, **_: Any):
    spread = [1] * len(shape)
    for n, d in zip(x.shape, broadcast_dimensions, strict=True):
        spread[d] = n
    return np.broadcast_to(x.reshape(spread), shape)


def reshape(x: np.ndarray, *, new_sizes: tuple, dimensions: Any = None, **_: Any):
    return None if dimensions is not None else x.reshape(new_sizes)


def squeeze(x: np.ndarray, *, dimensions: tuple, **_: Any):
    return x.squeeze(tuple(dimensions))


def transpose(x: np.ndarray, *, permutation: tuple, **_: Any):
    return x.transpose(permutation)


def sliced(x: np.ndarray, *, start_indices, limit_indices, strides, **_: Any):
    steps = strides or (1,) * x.ndim
    every = zip(start_indices, limit_indices, steps, strict=True)
    return x[tuple(slice(*bounds) for bounds in every)]


def dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: tuple, **_: Any):
    if len(starts) != x.ndim:
        return None
    at = [
        max(0, min(int(start), n - size))
        for start, n, size in zip(starts, x.shape, slice_sizes, strict=True)
    ]
    return x[tuple(slice(i, i + size) for i, size in zip(at, slice_sizes, strict=True))]


def concatenate(*arrays: np.ndarray, dimension: int, **_: Any):
    return np.concatenate(arrays, dimension)


QUICK = {
    primitives.convert_element_type_p: convert,
    primitives.broadcast_in_dim_p: broadcast,
    primitives.reshape_p: reshape,
    primitives.squeeze_p: squeeze,
    primitives.transpose_p: transpose,
    primitives.slice_p: sliced,
    primitives.dynamic_slice_p: dynamic_slice,
    primitives.concatenate_p: concatenate,
}


def install() -> None:
    """For this process; what is not plain arrays of one device goes the usual way."""
    for primitive, by_numpy in QUICK.items():
        usual = primitive.impl
        primitive.def_impl(functools.partial(evaluated, primitive, by_numpy, usual))


@quietly
def evaluated(primitive, by_numpy: Callable, usual: Callable, *operands, **params):
    if all(map(is_plain, operands)) and jax.sharding.get_abstract_mesh().empty:
        out, _ = primitive.abstract_eval(*map(jax.typeof, operands), **params)
        if is_simple(out):
            y = by_numpy(*map(np.asarray, operands), **params)
            if y is not None:
                # a copy: what it is a view of may be donated
                return jax.device_put(np.array(y, out.dtype, order="C"))
    return usual(*operands, **params)


def is_simple(aval: Any) -> bool:
    """A few plain numbers; wide ones only where JAX keeps them wide."""
    small = math.prod(aval.shape) <= LARGEST and isinstance(aval.dtype, np.dtype)
    wide = small and aval.dtype.itemsize == 8 and not jax.config.jax_enable_x64
    return small and not aval.weak_type and not wide


def is_plain(x: Any) -> bool:
    """An array of the default device that follows others to theirs, or NumPy's."""
    if not isinstance(x, jax.Array):
        return isinstance(x, np.ndarray | np.generic) and x.size <= LARGEST
    if isinstance(x, jax.core.Tracer) or not isinstance(x.dtype, np.dtype):
        return False
    return not x.committed and x.size <= LARGEST and len(x.devices()) == 1
