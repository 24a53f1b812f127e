"""Kernels of kimi_delta_attention on a GPU, against the chunk form in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, kimi_delta_attention, segment_ids_from_cu_seqlens
from tests.gpu.delta_rule.both_passes import NAMES, both
from tests.gpu.delta_rule.both_passes import check as check_rule
from tests.gpu.delta_rule.both_passes import draw as draw_operands
from tests.gpu.truth import EPSILON, on_a_gpu, relative_errors

pytestmark = on_a_gpu
check = functools.partial(check_rule, kimi_delta_attention)


def decays(rng, b, t, n, h):
    """Of channels that keep and that forget."""
    return rng.exponential(size=(b, t, n, h)) * 10 ** rng.uniform(-3, 1, h)


draw = functools.partial(draw_operands, decays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "b, t, k, n, h, hv, state",
    [
        (2, 700, 2, 4, 128, 128, True),
        (1, 65, 1, 3, 64, 128, False),
        (3, 1, 1, 2, 128, 64, True),
        (1, 130, 1, 1, 48, 80, True),  # padded to 64 and 128
        (5, 200, 28, 28, 64, 64, True),  # more programs than multiprocessors
    ],
)
def test_values_and_gradients(b, t, k, n, h, hv, state, dtype):
    check(draw(b, t, k, n, h, hv, dtype, state))


def test_a_token_that_forgets_everything_and_one_that_writes_nothing():
    query, key, value, g, beta, state = draw(1, 200, 1, 2, 64, 64, "bfloat16")
    g = g.at[:, 100].set(-jnp.inf).at[0, 30, 1, ::2].set(-jnp.inf)
    g = g.at[0, 64, 0].set(-1e30)
    beta = beta.at[:, 50].set(0.0)
    found = check([query, key, value, g, beta, state])
    found = dict(zip(NAMES, found, strict=True))
    np.testing.assert_array_equal(found["dg"][:, 100], 0.0)
    np.testing.assert_array_equal(found["dinitial"] * 0, 0.0)
    changed = [x.at[:, :100].set(x[:, 100:]) for x in (query, key, value)]
    with backend("triton", strict=True):
        again, _ = kimi_delta_attention(*[*changed, g, beta, state])
    np.testing.assert_array_equal(again[:, 100:], found["out"][:, 100:])


def test_strong_decay_and_equal_keys():
    query, key, value, g, beta, state = draw(1, 300, 1, 2, 128, 64, "bfloat16")
    check([query, key, value, 200 * g, beta, state])
    same = jnp.broadcast_to(key[:, :1], key.shape)
    check([query, same, value, 1e-3 * g, 0 * beta + 1, state], slack=2.0)


def test_packed_sequences():
    *operands, _ = draw(1, 300, 2, 2, 128, 128, "bfloat16")
    bounds = jnp.array([0, 70, 71, 300])
    ids = segment_ids_from_cu_seqlens(bounds, 300)
    rule = functools.partial(kimi_delta_attention, segment_ids=ids)
    with backend("triton", strict=True):
        out, last = jax.jit(rule)(*operands)
        alone = [kimi_delta_attention(*(x[:, 71:] for x in operands))]
    # other chunks: other roundings
    for y, its in zip((out[:, 71:], last), alone[0], strict=True):
        assert relative_errors(y, its, 1e-3)[0] < EPSILON["bfloat16"]


def test_every_run_has_the_same_bits():
    operands = draw(2, 700, 2, 4, 128, 128, "bfloat16")
    with backend("triton", strict=True):
        run = jax.jit(functools.partial(both, kimi_delta_attention))
        first = run(operands[2], operands[5], *operands)
        for _ in range(3):
            again = run(operands[2], operands[5], *operands)
            jax.tree.map(np.testing.assert_array_equal, first, again)


def test_decays_and_strengths_of_16_bits_and_a_mapped_axis():
    operands = draw(2, 100, 1, 2, 64, 64, "bfloat16", state=False)
    operands[3:] = [x.astype(jnp.bfloat16) for x in operands[3:]]

    def of_one(*rows):
        out, state = kimi_delta_attention(*[x[None] for x in rows])
        return out[0], state[0]

    with backend("triton", strict=True):
        out, state = jax.jit(kimi_delta_attention)(*operands)
        again, its = jax.jit(jax.vmap(of_one))(*operands)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(its, state)
    assert state.dtype == jnp.float32
