"""What moves, compares or adds few numbers, outside of tested code, without XLA.

XLA compiles each shape of each such call anew, in 25 milliseconds, which was a quarter
of the time of operators' tests: they have operands and results of thousands of shapes.
NumPy gives the same bits at once, in primitives that are called outside `jit` and in
functions that are JAX's own, such as `jnp.where`. What rounds more than once, and every
function that tests or the library put under `jit`, stays XLA's.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import pjit
from jax._src.sharding_impls import UnspecifiedValue
from jax.extend.core import Literal, primitives

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


def by_kind(f: Callable, kinds: str) -> Callable:
    """f for arrays of these kinds of NumPy alone."""

    def given(*arrays: np.ndarray, **_: Any) -> np.ndarray | None:
        return f(*arrays) if all(x.dtype.kind in kinds for x in arrays) else None

    return given


def select(which: np.ndarray, *cases: np.ndarray, **_: Any):
    if len(cases) != 2 or which.dtype != bool:
        return None
    return np.where(which, cases[1], cases[0])


def iota(*, dtype: Any, shape: tuple, dimension: int, **_: Any):
    along = [n if d == dimension else 1 for d, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(along), shape)


def reduced(f: Any) -> Callable:
    """Of whole numbers, whose order is of no importance."""

    def reduce(x: np.ndarray, *, axes: tuple, **_: Any):
        return f.reduce(x, axis=tuple(axes), dtype=x.dtype) if is_whole(x) else None

    return reduce


def is_whole(x: np.ndarray) -> bool:
    return x.dtype.kind in "bui" and x.size > 0


def copied(x: np.ndarray, **_: Any):
    return x


def shifted(f: Any, kind: str) -> Callable:
    """By less than an element is wide: the rest is XLA's to define."""

    def shift(x: np.ndarray, by: np.ndarray, **_: Any):
        if x.dtype.kind not in kind or not by.size:
            return None
        inside = 0 <= by.min() and by.max() < 8 * x.dtype.itemsize
        return f(x, by) if inside else None

    return shift


def padded(x: np.ndarray, value: np.ndarray, *, padding_config: tuple, **_: Any):
    if any(low < 0 or high < 0 or inner for low, high, inner in padding_config):
        return None
    around = [(low, high) for low, high, _ in padding_config]
    return np.pad(x, around, constant_values=value)


# By one kind of number in all operands: bfloat16 and 8 bits are none of NumPy's.
ROUNDS_ONCE = {
    primitives.add_p: np.add,
    primitives.sub_p: np.subtract,
    primitives.mul_p: np.multiply,
}
EXACT = {
    primitives.eq_p: np.equal,
    primitives.ne_p: np.not_equal,
    primitives.lt_p: np.less,
    primitives.le_p: np.less_equal,
    primitives.gt_p: np.greater,
    primitives.ge_p: np.greater_equal,
    primitives.neg_p: np.negative,
    primitives.abs_p: np.abs,
}
OF_BITS = {
    primitives.and_p: np.bitwise_and,
    primitives.or_p: np.bitwise_or,
    primitives.xor_p: np.bitwise_xor,
    primitives.not_p: np.bitwise_not,
    primitives.max_p: np.maximum,
    primitives.min_p: np.minimum,
}
REDUCTIONS = {
    primitives.reduce_sum_p: np.add,
    primitives.reduce_max_p: np.maximum,
    primitives.reduce_min_p: np.minimum,
    primitives.reduce_and_p: np.bitwise_and,
    primitives.reduce_or_p: np.bitwise_or,
}
OTHERS = {
    primitives.shift_left_p: shifted(np.left_shift, "iu"),
    primitives.shift_right_logical_p: shifted(np.right_shift, "u"),
    primitives.shift_right_arithmetic_p: shifted(np.right_shift, "i"),
    primitives.pad_p: padded,
    primitives.select_n_p: select,
    primitives.iota_p: iota,
    primitives.copy_p: copied,
}
FUNCTIONS = (
    QUICK
    | {p: by_kind(f, "iuf") for p, f in (ROUNDS_ONCE | EXACT).items()}
    | {p: by_kind(f, "biu") for p, f in OF_BITS.items()}
    | {p: reduced(f) for p, f in REDUCTIONS.items()}
    | OTHERS
)
OF_JAX = str(Path(jax.__file__).parent)
SCALARS = (bool, int, float)


def install() -> None:
    """For this process; what is not plain arrays of one device goes the usual way."""
    for primitive, by_numpy in QUICK.items():
        usual = primitive.impl
        primitive.def_impl(functools.partial(evaluated, primitive, by_numpy, usual))
    usual_jit = pjit._pjit_call_impl_python

    def call(*operands, jaxpr, **params):
        asked = (*params["in_shardings"], *params["out_shardings"])
        plain = not any(params["donated_invars"]) and all(
            isinstance(x, UnspecifiedValue) for x in asked
        )
        found = function_evaluated(jaxpr, operands) if plain else None
        if found is None:
            return usual_jit(*operands, jaxpr=jaxpr, **params)
        return found, None, None, []

    pjit._pjit_call_impl_python = call


@quietly
def evaluated(primitive, by_numpy: Callable, usual: Callable, *operands, **params):
    if all(map(is_plain, operands)) and jax.sharding.get_abstract_mesh().empty:
        out, _ = primitive.abstract_eval(*map(jax.typeof, operands), **params)
        if is_simple(out):
            y = by_numpy(*map(np.asarray, operands), **params)
            if y is not None:
                return placed(y, out)
    return usual(*operands, **params)


def placed(y: np.ndarray, aval: Any) -> jax.Array:
    # a copy: what it is a view of may be donated
    return jax.device_put(np.array(y, aval.dtype, order="C"))


@quietly
def function_evaluated(jaxpr, operands) -> list | None:
    """The results of a function of JAX's own that is made of these; None for others."""
    if not is_quick(jaxpr) or not jax.sharding.get_abstract_mesh().empty:
        return None
    if not all(isinstance(x, SCALARS) or is_plain(x) for x in operands):
        return None
    found = of_equations(jaxpr, operands)
    if found is None:
        return None
    return [placed(y, x.aval) for y, x in zip(found, jaxpr.outvars, strict=True)]


def of_equations(jaxpr, operands) -> list | None:
    values = {
        x: np.asarray(y, x.aval.dtype)
        for x, y in zip(jaxpr.invars, operands, strict=True)
    }

    def value(x):
        return np.asarray(x.val, x.aval.dtype) if isinstance(x, Literal) else values[x]

    for eqn in jaxpr.eqns:
        given = [value(x) for x in eqn.invars]
        if eqn.primitive is primitives.jit_p:
            found = of_equations(eqn.params["jaxpr"], given)
        else:
            y = FUNCTIONS[eqn.primitive](*given, **eqn.params)
            found = None if y is None else [y]
        if found is None:
            return None
        for x, y in zip(eqn.outvars, found, strict=True):
            values[x] = np.asarray(y, x.aval.dtype)
    return [value(x) for x in jaxpr.outvars]


# Of traced functions as long as they live: caches of JAX's end with them.
KNOWN: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def is_quick(jaxpr) -> bool:
    """Of JAX's own, of known equations, of which one rounds at most."""
    if jaxpr not in KNOWN:
        KNOWN[jaxpr] = has_quick_equations(jaxpr)
    return KNOWN[jaxpr]


def has_quick_equations(jaxpr) -> bool:
    file = jaxpr.debug_info.func_filename or ""
    every = list(equations(jaxpr))
    outs = [x for eqn in every for x in eqn.outvars] + list(jaxpr.outvars)
    return (
        file.startswith(OF_JAX)
        and not jaxpr.constvars
        and not jaxpr.effects
        and all(is_simple(x.aval) for x in jaxpr.outvars)
        and all(math.prod(x.aval.shape) <= LARGEST for x in outs)
        and all(eqn.primitive in FUNCTIONS for eqn in every)
        and sum(eqn.primitive in ROUNDS_ONCE for eqn in every) < 2
    )


def equations(jaxpr) -> Iterator:
    """Of the functions that it calls, too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitives.jit_p:
            yield from equations(eqn.params["jaxpr"])
        else:
            yield eqn


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
