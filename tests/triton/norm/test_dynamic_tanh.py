"""Kernels of dynamic_tanh in Triton's interpreter, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.norm.dynamic_tanh import dynamic_tanh_p
from jaxkern.triton.norm import dynamic_tanh as kernel
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
SHAPES = [(1, 1), (3, 5, 13), (9, 128), (700, 33), (5, 2500)]  # one stripe, and three
ABSENT = [(), ("weight",), ("weight", "bias")]


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, len(SHAPES) * len(ABSENT) + 3)


def operands_of(shape, absent):
    """x with values whose tanh is a polynomial, an exponential, and 1."""
    draw = np.random.default_rng(0).standard_normal
    x = jnp.float32(draw(shape) * 10.0 ** np.arange(-2, 3)[: shape[0], None][0])
    vectors = {name: jnp.float32(draw(shape[-1])) for name in ("weight", "bias")}
    vectors |= dict.fromkeys(absent)
    return x, jnp.float32(0.7), vectors["weight"], vectors["bias"]


def check(found, expected):
    for y, e in zip(found, expected, strict=True):
        assert (y is None) == (e is None)
        if e is not None:
            assert y.shape == e.shape and y.dtype == e.dtype
            scale = max(float(jnp.abs(e).max()), 1e-3)
            np.testing.assert_allclose(y, e, rtol=2e-5, atol=3e-6 * scale)


@alone
@pytest.mark.parametrize("absent", ABSENT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, absent):
    operands = operands_of(shape, absent)
    dy = jnp.float32(np.random.default_rng(1).standard_normal(shape))
    assert dynamic_tanh_p.bwd is not None
    expected = dynamic_tanh_p.bwd.reference(*operands, dy)
    wanted = tuple(x is not None for x in operands)
    with interpreted():
        y = kernel.dynamic_tanh(*operands)
        found = kernel.dynamic_tanh_bwd(*operands, dy, wanted=wanted)
    check([y], [dynamic_tanh_p.reference(*operands)])
    check(found, expected)


@alone
def test_what_is_not_wanted_is_not_computed():
    operands = operands_of((9, 128), ())
    dy = jnp.ones((9, 128))
    with interpreted():
        only = kernel.dynamic_tanh_bwd(*operands, dy, wanted=(False, True, False, True))
        every = kernel.dynamic_tanh_bwd(*operands, dy, wanted=(True,) * 4)
    assert only[0] is None and only[2] is None
    np.testing.assert_array_equal(only[1], every[1])
    np.testing.assert_array_equal(only[3], every[3])


@alone
@pytest.mark.filterwarnings("ignore:invalid value")  # of inf - inf, not chosen
def test_tails_and_nan():
    x = jnp.array([[jnp.inf, -jnp.inf, jnp.nan, 1e-30, -6.0]])
    with interpreted():
        y = kernel.dynamic_tanh(x, jnp.float32(2), None, None)
        dx, *_ = kernel.dynamic_tanh_bwd(
            x, jnp.float32(2), None, None, jnp.ones_like(x), wanted=(True, *[False] * 3)
        )
    np.testing.assert_allclose(y, [[1, -1, np.nan, 2e-30, -1]], rtol=1e-6)
    assert jnp.isnan(dx[0, 2])
    np.testing.assert_allclose(dx[0, 4], 2 / np.cosh(12.0) ** 2, rtol=1e-4)


def test_float64_is_refused_in_words():
    x = jax.ShapeDtypeStruct((2, 3), jnp.float64)
    assert kernel.unsupported(x=x) in ("`x` is float64", bridge.missing())
