"""What the recurrences share about rows that hold several sequences and padding.

Other tests pack a row or pad it. Only where both meet can an id that changes in the
padding clear the state that the last sequence has left.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.primitives.delta_rule.packed_sequences import sequences_in_a_row

B, T, LENGTH = 2, 6, 4
IDS = np.array([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 0, 0]])


def draw(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape))


def heads(*dims):
    return draw(B, T, 2, *dims)


def below_zero(*shape):
    return -jnp.abs(draw(*shape))


KEYS = (heads(4), heads(4), heads(3))
SSD = (heads(3), jnp.abs(heads()), below_zero(2), draw(B, T, 1, 4), draw(B, T, 1, 4))
SCAN = (draw(B, T, 3), jnp.abs(draw(B, T, 3)), below_zero(3, 4), *[draw(B, T, 4)] * 2)
RECURRENCES = {
    "gated_delta_rule": (*KEYS, -jnp.abs(heads()), jnp.abs(heads())),
    "kimi_delta_attention": (*KEYS, -jnp.abs(heads(4)), jnp.abs(heads())),
    "state_space_dual": SSD,
    "selective_scan": SCAN,
    "causal_conv1d": (draw(B, T, 3), draw(3, 3)),
}


@pytest.mark.parametrize("op", RECURRENCES)
def test_an_id_that_changes_in_the_padding_clears_no_state(op):
    f, operands = getattr(jaxkern, op), RECURRENCES[op]
    rows = [x.shape[:2] == (B, T) for x in operands]
    cut = [x[:, :LENGTH] if r else x for x, r in zip(operands, rows, strict=True)]
    lengths = jnp.full(B, LENGTH)
    padded = functools.partial(f, segment_ids=IDS, active_length=lengths)
    out, state = jax.jit(padded)(*operands)
    expected = jax.jit(functools.partial(f, segment_ids=IDS[:, :LENGTH]))(*cut)
    np.testing.assert_allclose(out[:, :LENGTH], expected[0], atol=1e-5)
    np.testing.assert_allclose(state, expected[1], atol=1e-5)
    assert np.abs(state).max() > 1e-3


@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention"])
def test_a_decay_without_a_batch_is_refused_where_a_mask_is_given(name):
    """The mask was broadcast with it, and each row took the same decay."""
    query, key, value, g, beta = RECURRENCES[name]
    rule = getattr(jaxkern, name)
    for mask in (dict(segment_ids=IDS), dict(active_length=np.array([LENGTH, 3]))):
        with pytest.raises(TypeError, match=rf"{name}: `g` must have dims \[b t"):
            rule(query, key, value, g[0], beta, **mask)


@pytest.mark.parametrize("name", ["state_space_dual", "selective_scan"])
def test_a_step_without_a_batch_is_refused_where_a_mask_is_given(name):
    x, step, *others = RECURRENCES[name]
    for mask in (dict(segment_ids=IDS), dict(active_length=np.array([LENGTH, 3]))):
        with pytest.raises(TypeError, match=rf"{name}: `(step|delta)` must have dims"):
            getattr(jaxkern, name)(x, step[0], *others, **mask)


def test_tokens_before_the_first_sequence_are_zeros():
    """They were read from the end of the last one."""
    rows = 1 + jnp.arange(6.0).reshape(2, 3, 1)
    row = sequences_in_a_row(rows, jnp.array([2, 4, 5]), 7)
    np.testing.assert_array_equal(row[0, :, 0], [0, 0, 1, 2, 4, 0, 0])


def test_the_longest_sequence_has_a_token():
    operands = (x[:1] for x in RECURRENCES["gated_delta_rule"])
    with pytest.raises(ValueError, match="gated_delta_rule: `longest` is 0"):
        jaxkern.gated_delta_rule(*operands, cu_seqlens=jnp.array([0, 3]), longest=0)
