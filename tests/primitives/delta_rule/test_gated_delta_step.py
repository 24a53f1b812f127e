"""gated_delta_step: the formula, a sequence token by token, head order, the state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import gated_delta_rule, gated_delta_step
from jaxkern.testing.checks import bf16, case, f32, uniform
from tests.primitives.delta_rule.test_gated_delta_rule import as_jax, draw, recurrence


def shapes(b, k, g, h, hv, spec=f32, channels=()):
    """`channels` of the keys have decays of their own."""
    return dict(
        query=spec(b, k, h),
        key=spec(b, k, h, scale=max(h, 1) ** -0.5),
        value=spec(b, k * g, hv),
        g=uniform(b, k * g, *channels, low=-1.0, high=0.0),
        beta=uniform(b, k * g),
        state=f32(b, k * g, h, hv),
        scale=max(h, 1) ** -0.5,
    )


CASES = [
    case("plain", **shapes(1, 1, 3, 3, 2)),
    case("even", full=True, **shapes(2, 2, 2, 4, 2)),
    case("no_sequences", full=True, **shapes(0, 2, 1, 2, 2)),
    case("qwen3_next_decode", full=True, **shapes(2, 16, 2, 128, 128, bf16)),
]


@pytest.mark.parametrize("gqa", ["block", "tiled"])
def test_steps_are_the_sequence(gqa):
    query, key, value, g, beta, state = as_jax(draw(2, 4, 2, 2, 3, 2), jnp.float32)
    expected, final = gated_delta_rule(query, key, value, g, beta, state, gqa=gqa)
    for i in range(4):
        token = (x[:, i] for x in (query, key, value, g, beta))
        out, state = gated_delta_step(*token, state, gqa=gqa)
        np.testing.assert_allclose(out, expected[:, i], atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-5)


def test_one_step_is_the_formula():
    operands = draw(1, 1, 2, 2, 4, 3)
    token = [x[:, 0] for x in operands[:5]]
    out, state = gated_delta_step(*as_jax((*token, operands[5]), jnp.float32))
    expected, final, _ = recurrence(*operands, scale=0.5)
    np.testing.assert_allclose(out, expected[:, 0], atol=1e-6)
    np.testing.assert_allclose(state, final, atol=1e-6)


@pytest.mark.parametrize("gqa", ["block", "tiled"])
def test_states_lie_in_the_slots_of_a_pool(gqa):
    """Rows without a slot, -1 or behind the pool, give zeros and write nothing."""
    operands = as_jax(draw(4, 1, 2, 2, 4, 3), jnp.float32)
    token = [x[:, 0] for x in operands[:5]]
    pool = jax.random.normal(jax.random.key(0), (6, *operands[5].shape[1:]))
    slots = np.array([4, -1, 1, 6])
    f = jax.jit(lambda *a: gated_delta_step(*a[:-1], gqa=gqa, state_indices=a[-1]))
    out, new = f(*token, pool, slots)
    expected, states = np.zeros(out.shape), np.array(pool)
    for row in (0, 2):
        one = [x[row : row + 1] for x in token]
        y, state = gated_delta_step(*one, pool[slots[row]][None], gqa=gqa)
        expected[row], states[slots[row]] = y[0], state[0]
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(new, states, atol=1e-6)
    others = np.array([0, 2, 3, 5])
    np.testing.assert_array_equal(new[others], pool[others])
    grad = jax.grad(lambda pool: f(*token, pool, slots)[0].sum())(pool)
    expected = jnp.zeros_like(pool)
    for row in (0, 2):
        one = [x[row : row + 1] for x in token]

        def alone(state, one=one):
            return gated_delta_step(*one, state[None], gqa=gqa)[0].sum()

        of_state = jax.grad(alone)(pool[slots[row]])
        expected = expected.at[slots[row]].set(of_state)
    np.testing.assert_allclose(grad, expected, atol=1e-6)


def test_a_donated_pool_is_written_in_place():
    operands = as_jax(draw(2, 1, 1, 1, 4, 4), jnp.float32)
    token, pool = [x[:, 0] for x in operands[:5]], jnp.zeros((64, 1, 4, 4))

    def step(pool, slots):
        return gated_delta_step(*token, pool, state_indices=slots)

    compiled = jax.jit(step, donate_argnums=0).lower(pool, np.array([0, 1])).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes


def test_the_state_keeps_its_dtype():
    *token, state = as_jax(draw(1, 1, 1, 1, 4, 3), jnp.bfloat16)
    token = [x[:, 0] for x in token]
    for dtype in (jnp.float32, jnp.bfloat16):
        out, new = gated_delta_step(*token, state.astype(dtype))
        assert out.dtype == jnp.bfloat16 and new.dtype == dtype


def test_errors_name_the_operand():
    *token, state = as_jax(draw(1, 1, 1, 2, 4, 3), jnp.float32)
    token = [x[:, 0] for x in token]
    with pytest.raises(TypeError, match="gated_delta_step: dim `hv` is 3 in `value`"):
        gated_delta_step(*token, state.swapaxes(2, 3))
    with pytest.raises(TypeError, match="gated_delta_step: `state_indices` must be"):
        gated_delta_step(*token, state, state_indices=jnp.zeros(3, int))
    with pytest.raises(ValueError, match="gated_delta_step: `gqa` must be"):
        gated_delta_step(*token, state, gqa="other")
