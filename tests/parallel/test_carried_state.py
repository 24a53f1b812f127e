"""Recurrences over shards: the same as over the whole sequence, and what moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import (
    gated_delta_rule,
    l2_norm,
    sharded_gated_delta_rule,
    sharded_state_space_dual,
    state_space_dual,
)
from jaxkern.testing.interpreter import evaluated
from tests.parallel.test_ring_attention import (
    T,
    agree,
    collectives,
    draw,
    everything,
    mesh_of,
)

IDS = {
    "one sequence": None,
    # a change within a shard, one at its begin, and none
    "segments": jnp.array([[0] * 3 + [1] * 5 + [2] * 8, [7] * T]),
}


def of_delta_rule():
    query, key = l2_norm(draw(2, T, 2, 8)), l2_norm(draw(2, T, 2, 8))
    g, beta = -jax.nn.softplus(draw(2, T, 4)), jax.nn.sigmoid(draw(2, T, 4))
    return query, key, draw(2, T, 4, 6), g, beta, draw(2, 4, 8, 6)


def of_dual():
    step, a = jax.nn.softplus(draw(2, T, 4) - 1), -jnp.exp(draw(4) / 2)
    state = draw(2, 4, 8, 5)
    return draw(2, T, 4, 8), step, a, draw(2, T, 2, 5), draw(2, T, 2, 5), state


RULES = {
    "gated_delta_rule": (sharded_gated_delta_rule, gated_delta_rule, of_delta_rule),
    "state_space_dual": (sharded_state_space_dual, state_space_dual, of_dual),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("name", RULES)
def test_shards_give_what_the_sequence_gives(name, ids):
    sharded, whole, operands = RULES[name]
    operands = operands()
    f = functools.partial(sharded, axis_name="x", mesh=mesh_of(), segment_ids=ids)
    whole = functools.partial(whole, segment_ids=ids)
    expected = everything(whole, operands, call=evaluated)
    agree(everything(f, operands), expected, 1e-4)
    without = operands[:-1]
    agree(jax.jit(f)(*without), evaluated(whole, *without), 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_one_exchange_inside_shard_map(name):
    """The maps of all shards, and one sum that says the last state to all."""
    sharded, whole, operands = RULES[name]
    operands, mesh = operands(), mesh_of()
    specs = [P(None, "x") if x.ndim > 1 and x.shape[1] == T else P() for x in operands]
    f = functools.partial(sharded, axis_name="x")
    f = jax.shard_map(
        f, mesh=mesh, in_specs=tuple(specs), out_specs=(P(None, "x"), P())
    )
    pairs = zip(operands, specs, strict=True)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in pairs]
    agree(jax.jit(f)(*placed), jax.jit(whole)(*operands), 1e-5)
    found = collectives(f, *placed)
    assert set(found) == {"all-gather", "all-reduce"}
    assert found["all-gather"] <= 2 and found["all-reduce"] == 1


def test_a_forgotten_past_is_forgotten_in_the_shard_behind():
    """Infinite decay of the first token of a shard, and of one within."""
    query, key, value, g, beta, state = of_delta_rule()
    g = g.at[:, 4].set(-jnp.inf).at[:, 10].set(-jnp.inf)
    operands = query, key, value, g, beta, state
    f = functools.partial(sharded_gated_delta_rule, axis_name="x", mesh=mesh_of())
    found, expected = jax.jit(f)(*operands), jax.jit(gated_delta_rule)(*operands)
    agree(found, expected, 1e-5)
    assert np.isfinite(found[0]).all()


def test_states_keep_their_dtype():
    *tokens, state = of_delta_rule()
    f = functools.partial(sharded_gated_delta_rule, axis_name="x", mesh=mesh_of())
    narrow = [x.astype(jnp.bfloat16) for x in tokens]
    out, final = jax.eval_shape(f, *narrow, state.astype(jnp.bfloat16))
    assert (out.dtype, final.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert jax.eval_shape(f, *narrow)[1].dtype == jnp.float32


@pytest.mark.parametrize("name", RULES)
def test_errors_in_words(name):
    sharded, _, operands = RULES[name]
    operands = operands()
    with pytest.raises(ValueError, match=f"sharded_{name}: no mesh axis 'y', known"):
        sharded(*operands, axis_name="y", mesh=mesh_of())
    with pytest.raises(ValueError, match=f"sharded_{name}: .*which do not divide it"):
        short = [x[:, :14] if x.shape[1:2] == (T,) else x for x in operands]
        sharded(*short, axis_name="x", mesh=mesh_of())
