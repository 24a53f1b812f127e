"""NaN of one packed sequence stays in it on a GPU, in XLA's references.

Kernels multiply what a token does not see by 0: docs/design/gated_delta_rule.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern import backend
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu

T, N, H, BOUNDARY = 200, 4, 64, 100  # in the middle of a chunk
IDS = (jnp.arange(T)[None] >= BOUNDARY).astype(jnp.int32)


def operands_of(op):
    rng = np.random.default_rng(0)

    def draw(*shape, of="bfloat16"):
        return jnp.asarray(rng.standard_normal((1, T, *shape)) / 4, of)

    key, gate = draw(N, H), jnp.abs(draw(N, of="float32"))
    if op == "state_space_dual":
        return draw(N, H), gate, -jnp.ones(N), key, draw(N, H)
    of_channels = op == "kimi_delta_attention"
    g = -jnp.abs(draw(N, H, of="float32")) if of_channels else -gate
    return draw(N, H), key, draw(N, H), g, gate


@pytest.mark.parametrize("what", ["a value", "the first state"])
@pytest.mark.parametrize(
    "op", ["gated_delta_rule", "kimi_delta_attention", "state_space_dual"]
)
def test_the_next_sequence_is_as_it_was(op, what):
    operands, state = operands_of(op), jnp.zeros((1, N, H, H))
    at = 0 if op == "state_space_dual" else 2

    @jax.jit
    def run(operands, state):
        with backend("xla"):
            f = getattr(jaxkern, op)
            return f(*operands, state, segment_ids=IDS)

    expected = run(operands, state)
    if what == "a value":
        bad = operands[at].at[0, BOUNDARY - 3].set(jnp.nan)
        operands = (*operands[:at], bad, *operands[at + 1 :])
    else:
        state = state.at[0, 0].set(jnp.nan)
    out, final = run(operands, state)
    for y, e in ((out[:, BOUNDARY:], expected[0][:, BOUNDARY:]), (final, expected[1])):
        np.testing.assert_allclose(jnp.float32(y), jnp.float32(e), rtol=1e-2, atol=1e-2)
    assert np.isnan(out[:, :BOUNDARY]).any()
