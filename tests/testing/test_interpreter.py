"""What StableHLO's interpreter computes is what XLA does, and what is left to XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkern.testing import interpreter
from jaxkern.testing.interpreter import evaluate_each, evaluated

X = np.linspace(-2.0, 3.0, 6, dtype=np.float32)
WHOLE = np.array([7, -7, 5], np.int32)

INTERPRETED = {
    "products of a dim": (lambda x: jnp.outer(x, x) @ jnp.sin(x), X),
    "a loop": (lambda x: lax.fori_loop(0, 3, lambda i, y: y * x + i, x), X),
    "what is composed": (lambda x: (lax.erf(x), lax.top_k(x, 2)), X),
    "bfloat16": (lambda x: x / 3, X.astype(jnp.bfloat16)),
    "a float8 in between": (lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype), X),
    "not a number": (lambda x: jnp.log(x).astype(jnp.int32), X),
    "division": (lambda x: (x // 2, x % 3, lax.div(x, 2)), WHOLE),
    "an empty slice": (lambda x: jnp.concatenate([x[:0], x]), X),
    "rows in order": (lambda x: jnp.argsort(x[::-1]), X),
}
LEFT_TO_XLA = {
    "a sum over nothing": (lambda x: x[:, :0] @ x[:0], np.ones((2, 2), np.float32)),
    "complex numbers": (lambda x: jnp.abs(jnp.fft.fft(x)), X),
    "a callback": (lambda x: jax.pure_callback(np.sin, x, x), X),
}


def check(monkeypatch, f, x, left: bool):
    seen = []

    def watched(module):
        seen.append(whole(module))
        return seen[-1]

    whole = interpreter.interpreted
    monkeypatch.setattr(interpreter, "interpreted", watched)
    found, expected = evaluated(f, x), jax.jit(f)(x)
    assert [y is None for y in seen] == [left]
    for y, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert y.dtype == e.dtype
        y, e = np.asarray(y, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(y, e, rtol=1e-6)


@pytest.mark.parametrize("name", INTERPRETED)
def test_it_computes_what_xla_does(name, monkeypatch):
    check(monkeypatch, *INTERPRETED[name], left=False)


@pytest.mark.parametrize("name", LEFT_TO_XLA)
def test_what_is_left_to_xla(name, monkeypatch):
    check(monkeypatch, *LEFT_TO_XLA[name], left=True)


def test_a_division_by_zero_ends_nothing():
    """It is no number that a check compares, but may stand where none is chosen."""
    found = evaluated(lambda x: jnp.where(x > 0, lax.div(7, x), x), WHOLE * [1, 0, 1])
    np.testing.assert_array_equal(found, [1, 0, 1])


def test_calls_with_and_without_numbers_stay_in_order():
    calls = [(X,), (X[:0],), (2 * X,)]
    found = evaluate_each(lambda x: x.sum(), calls)
    np.testing.assert_allclose(found, [x.sum() for (x,) in calls], rtol=1e-6)
