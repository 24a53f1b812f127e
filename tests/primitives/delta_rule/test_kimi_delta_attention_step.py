"""kimi_delta_attention_step: a sequence token by token, and states in a pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import kimi_delta_attention, kimi_delta_attention_step
from jaxkern.testing.checks import bf16, case
from tests.primitives.delta_rule.test_gated_delta_step import shapes as shapes_of_step
from tests.primitives.delta_rule.test_kimi_delta_attention import as_jax, draw


def shapes(b, k, g, h, hv, *given):
    return shapes_of_step(b, k, g, h, hv, *given, channels=(h,))


CASES = [
    case("plain", **shapes(1, 1, 3, 3, 2)),
    case("even", full=True, **shapes(2, 2, 2, 4, 2)),
    case("no_sequences", full=True, **shapes(0, 2, 1, 2, 2)),
    case("kimi_linear_decode", full=True, **shapes(2, 32, 1, 128, 128, bf16)),
]


def test_steps_are_the_sequence():
    query, key, value, g, beta, state = as_jax(draw(2, 4, 2, 2, 3, 2), jnp.float32)
    operands = (query, key, value, g, beta)
    expected, final = kimi_delta_attention(*operands, state, chunk_size=1)
    step = jax.jit(kimi_delta_attention_step)
    for i in range(4):
        out, state = step(*(x[:, i] for x in operands), state)
        np.testing.assert_allclose(out, expected[:, i], atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-5)


def test_states_lie_in_the_slots_of_a_pool():
    """Rows without a slot, -1 or behind the pool, give zeros and write nothing."""
    *token, states = as_jax(draw(4, 1, 2, 2, 4, 3), jnp.float32)
    token = [x[:, 0] for x in token]
    pool = jnp.concatenate([states, states[:2] + 1])
    slots = np.array([4, -1, 1, 6])
    f = jax.jit(lambda *a: kimi_delta_attention_step(*a[:-1], state_indices=a[-1]))
    out, new = f(*token, pool, slots)
    rows = pool[np.array([4, 0, 1, 0])]
    y, after = jax.jit(kimi_delta_attention_step)(*token, rows)
    held = np.array([0, 2])
    np.testing.assert_allclose(out[held], y[held], atol=1e-6)
    np.testing.assert_allclose(new[slots[held]], after[held], atol=1e-6)
    assert not np.any(out[np.array([1, 3])])
    others = np.array([0, 2, 3, 5])
    np.testing.assert_array_equal(new[others], pool[others])


def test_errors_name_the_operand():
    *token, state = as_jax(draw(1, 1, 1, 2, 4, 3), jnp.float32)
    query, key, value, g, beta = (x[:, 0] for x in token)
    with pytest.raises(TypeError, match="kimi_delta_attention_step: dim `h` is 4"):
        kimi_delta_attention_step(query, key, value, g[..., :2], beta, state)
    with pytest.raises(TypeError, match="kimi_delta_attention_step: `state_indices`"):
        slots = jnp.zeros(3, int)
        kimi_delta_attention_step(
            query, key, value, g, beta, state, state_indices=slots
        )
