"""Kernels of causal_conv1d on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, causal_conv1d
from jaxkern.primitives.delta_rule.causal_conv1d import causal_conv1d_p
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "b, t, d, w",
    [
        (2, 300, 512, 4),
        (1, 16, 100, 3),
        (3, 65, 1, 2),
        (1, 700, 1000, 8),
        (2, 64, 8, 1),
    ],
)
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution(b, t, d, w, everything, activation, dtype):
    rng = np.random.default_rng(t)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    operands = [draw(b, t, d), draw(d, w)]
    ids = None
    if everything:
        operands += [draw(d), draw(b, w - 1, d)]
        ids = jnp.asarray(np.sort(rng.integers(0, 5, (b, t)), 1), jnp.int32)

    def f(x, weight, bias=None, state=None):
        return causal_conv1d_p(x, weight, bias, state, ids, activation=activation)

    if w == 1 and everything:
        operands.pop()  # a state without elements has no error to measure
    check_against_float64(f, *operands, slack=2.0)


def test_a_cut_sequence_continues_and_padding_does_not_enter():
    x = jax.random.normal(jax.random.key(0), (2, 100, 256))
    weight = jax.random.normal(jax.random.key(1), (256, 4))
    with backend("triton", strict=True):
        whole, end = causal_conv1d(x, weight, activation="silu")
        first, state = causal_conv1d(x[:, :37], weight, activation="silu")
        rest, last = causal_conv1d(x[:, 37:], weight, None, state, activation="silu")
        bad = x.at[:, 50:].set(jnp.nan)
        length = jnp.array([50, 20])
        y, _ = causal_conv1d(bad, weight, active_length=length, activation="silu")
    np.testing.assert_allclose(
        jnp.concatenate([first, rest], 1), whole, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(last, end)
    np.testing.assert_allclose(y[0, :50], whole[0, :50], rtol=1e-5, atol=1e-6)
