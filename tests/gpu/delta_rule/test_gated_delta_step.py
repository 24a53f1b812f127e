"""Kernel of gated_delta_step on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, gated_delta_step
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize(
    "dtype, state_dtype",
    [
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "float32"),
    ],
)
@pytest.mark.parametrize(
    "b, k, group, h, hv",
    [(1, 16, 2, 128, 128), (32, 4, 1, 128, 128), (3, 2, 3, 100, 70), (2, 1, 1, 1, 1)],
)
def test_step(b, k, group, h, hv, dtype, state_dtype):
    rng = np.random.default_rng(h)

    def draw(*shape, of=dtype):
        return jnp.asarray(rng.standard_normal(shape), of)

    n = k * group
    query, key, value = draw(b, k, h), draw(b, k, h) * h**-0.5, draw(b, n, hv)
    g = -jnp.abs(draw(b, n, of="float32"))
    beta = jnp.abs(draw(b, n, of="float32")) / 2
    state = draw(b, n, h, hv, of=state_dtype)
    operands = (query, key, value, g, beta, state)
    with backend("triton", strict=True):
        jax.block_until_ready(jax.jit(gated_delta_step)(*operands))
    # the gradient has no kernel
    check_against_float64(gated_delta_step, *operands, slack=2.0, strict=False)


def test_many_steps_in_place_are_those_of_the_reference():
    rng = np.random.default_rng(0)
    token = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in [(2, 4, 64)] * 3]
    g, beta = jnp.full((2, 4), -0.1), jnp.full((2, 4), 0.02)

    def run(state):
        def step(state, _):
            out, state = gated_delta_step(*token, g, beta, state)
            return state, out

        return jax.lax.scan(step, state, length=20)

    def start():
        return jnp.zeros((2, 4, 64, 64)) + 1.0

    with backend("triton", strict=True):
        state, out = jax.jit(run, donate_argnums=0)(start())
    with backend("xla"):
        expected = jax.jit(run)(start())
    np.testing.assert_allclose(state, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out, expected[1], rtol=1e-4, atol=1e-5)
