"""Kernels of state_space_dual on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, state_space_dual
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "rows, t, heads, groups, h, size",
    [
        (2, 200, 4, 2, 64, 128),
        (3, 1, 8, 1, 64, 128),
        (1, 65, 3, 1, 40, 24),
        (1, 130, 2, 2, 128, 256),
        (2, 150, 3, 1, 128, 128),
        (9, 200, 12, 1, 64, 128),  # several heads a program, parts of a group
        (5, 77, 48, 1, 64, 128),  # more programs than multiprocessors
    ],
)
def test_values_and_gradients(rows, t, heads, groups, h, size, dtype):
    rng = np.random.default_rng(h)

    def draw(*shape, of=dtype):
        return jnp.asarray(rng.standard_normal(shape), of)

    step = jnp.abs(draw(rows, t, heads, of="float32")) / 4
    a = -jnp.exp(draw(heads, of="float32"))
    b, c = draw(rows, t, groups, size), draw(rows, t, groups, size) * size**-0.5
    operands = (draw(rows, t, heads, h), step, a, b, c)
    state = draw(rows, heads, h, size, of="float32")
    ids = jnp.cumsum(jnp.asarray(rng.uniform(size=(rows, t)) < 0.02), 1)

    def packed(*operands):
        return state_space_dual(*operands, segment_ids=ids)

    for f, given in ((packed, (*operands, state)), (state_space_dual, operands)):
        with backend("triton", strict=True):
            jax.block_until_ready(jax.jit(f)(*given))
        # gradients have kernels for states of up to 128 a column
        check_against_float64(f, *given, slack=2.0, strict=size <= 128)


def test_every_run_has_the_same_bits():
    rng = np.random.default_rng(0)
    x, b, c = (jnp.asarray(rng.standard_normal((2, 300, 4, 64)), "bfloat16"),) * 3
    step = jnp.asarray(rng.exponential(0.2, (2, 300, 4)), jnp.float32)

    def both(*operands):
        y, pull = jax.vjp(lambda *a: state_space_dual(*a), *operands)
        return y, pull(y)

    run = jax.jit(both)
    with backend("triton", strict=True):
        first = run(x, step, -jnp.ones(4), b, c)
        for _ in range(3):
            again = run(x, step, -jnp.ones(4), b, c)
            jax.tree.map(np.testing.assert_array_equal, first, again)
