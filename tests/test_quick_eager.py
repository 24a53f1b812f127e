"""What NumPy computes in XLA's place has the same bits."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import pjit

from tests import quick_eager

FLOATS, WHOLE = ("float32", "float16"), ("int32", "uint8")
LIKE = {  # functions of JAX's own and the dtypes for which they are quick
    jnp.add: (*FLOATS, *WHOLE),
    jnp.subtract: (*FLOATS, *WHOLE),
    jnp.multiply: (*FLOATS, *WHOLE),
    jnp.equal: (*FLOATS, *WHOLE),
    jnp.less: (*FLOATS, *WHOLE),
    jnp.maximum: WHOLE,
    jnp.bitwise_xor: WHOLE,
    jnp.negative: (*FLOATS, *WHOLE),
    jnp.abs: FLOATS,
    jnp.max: WHOLE,
    jnp.moveaxis: ("bfloat16",),
}
CASES = [(f, dtype) for f, dtypes in LIKE.items() for dtype in dtypes]
ONE = (jnp.negative, jnp.abs, jnp.max)


def operands(f, dtype):
    if dtype in WHOLE:
        kind = jnp.iinfo(dtype)
        x = np.array([0, 1, 2, 7, kind.max, kind.max - 1, kind.min], dtype)
    else:
        finite = np.array([0, -0.0, 1, 3.3, -7.1, 60000, 1e-4])
        x = np.append(finite, [np.inf, -np.inf, np.nan]).astype(dtype)
    if f is jnp.moveaxis:
        return jnp.asarray(x)[:, None, None], 0, 1
    return (jnp.asarray(x),) if f in ONE else (jnp.asarray(x)[:, None], jnp.asarray(x))


@pytest.fixture(scope="module")
def by_xla():
    """Of all cases; in one program, which is none of JAX's own."""

    def every():
        return [f(*operands(f, dtype)) for f, dtype in CASES]

    return jax.jit(every)()


@pytest.fixture
def by_numpy(monkeypatch):
    """Calls a function and says what NumPy gave for the functions that it called."""
    usual, found = pjit._pjit_call_impl_python, []

    def call(*operands, jaxpr, **params):
        found.append(quick_eager.function_evaluated(jaxpr, operands))
        return usual(*operands, jaxpr=jaxpr, **params)

    def run(f, *operands):
        jax.clear_caches()
        found.clear()
        f(*operands)
        return list(found)

    monkeypatch.setattr(pjit, "_pjit_call_impl_python", call)
    return run


@pytest.mark.parametrize("k", range(len(CASES)))
def test_bits(k, by_xla, by_numpy):
    f, dtype = CASES[k]
    [[found]] = by_numpy(f, *operands(f, dtype))
    assert found.dtype == by_xla[k].dtype
    assert bits(found) == bits(by_xla[k])


def bits(x):
    """A NaN has no sign of its own: that of inf - inf is the processor's choice."""
    x = np.array(x)
    if (x != x).any():
        x[x != x] = np.nan
    return x.tobytes()


def test_what_is_left_to_xla(by_numpy):
    """Functions of one's own, what rounds twice, and arrays that have their place."""
    x = jnp.ones(3)
    for f in (jnp.sum, jnp.exp, jax.jit(lambda x: x + x)):
        assert by_numpy(f, x) == [None]
    placed = jax.device_put(x, jax.devices()[1])
    assert by_numpy(jnp.add, x, placed) == [None]
    assert by_numpy(jnp.add, x, x) != [None]


def test_no_traced_function_is_kept_alive():
    """Else JAX finds it for arrays of 64 bits that have become ones of 32."""
    traced = jax.make_jaxpr(lambda x: x + 1)(1.0)
    quick_eager.is_quick(traced)
    alive = weakref.ref(traced)
    del traced
    gc.collect()
    assert alive() is None
