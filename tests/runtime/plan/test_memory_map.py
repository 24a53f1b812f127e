"""The arena: nothing that lives at the same time lies in the same place."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxkern import runtime

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def busy(w1, w2, x):
    """Loops, reductions, values that die early and late."""

    def step(c, _):
        return jnp.tanh(c @ w2), None

    h, _ = jax.lax.scan(step, jax.nn.gelu(x @ w1), length=3)
    a = jnp.cumsum(h, 0) @ w1
    b = jax.nn.softmax(a @ w2) @ w1
    return h.reshape(-1), jax.lax.sort(a + b), x + 1


@pytest.fixture(scope="module")
def memory():
    return runtime.compile(busy, W, W, X, donate=2).memory()


@pytest.mark.smoke
def test_totals_are_those_of_the_shapes(memory):
    assert memory.arguments == 4 * (256 + 256 + 128)
    assert memory.outputs >= 4 * 3 * 128
    assert memory.aliases == 4 * 128  # x, donated, becomes one of the results
    assert memory.peak >= memory.arguments
    blocks = {a.kind: 0 for a in memory.allocations}
    for a in memory.allocations:
        blocks[a.kind] += a.size
    assert blocks["argument"] == memory.arguments
    assert blocks["temporary"] <= memory.temporaries


@pytest.mark.smoke
def test_no_two_live_buffers_overlap(memory):
    """At the border one instruction may write where it reads for the last time."""
    assert memory.why_no_arena is None
    assert len(memory.arena) > 3
    for allocation in memory.allocations:
        for a, b in itertools.combinations(allocation.buffers, 2):
            apart = a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
            assert apart or a.last <= b.first or b.last <= a.first, (a, b)


def test_the_arena_is_as_large_as_its_buffers(memory):
    (block,) = [a for a in memory.allocations if a.kind == "temporary"]
    assert max(b.offset + b.size for b in memory.arena) == block.size
    assert 0 < max(memory.live_bytes()) <= block.size
    assert len(memory.live_bytes()) == len(memory.order)
    # places are used again: together they are larger than the arena
    assert sum(b.size for b in memory.arena) > block.size


def test_a_donated_argument_shares_its_block_with_a_result(memory):
    (donated,) = [a for a in memory.allocations if a.aliased]
    assert donated.parameter == 2
    argument, *later = sorted(donated.buffers, key=lambda b: b.first)
    assert argument.name.startswith("x") and argument.first == 0
    assert later and max(b.last for b in later) > argument.last


def test_a_live_range_ends_with_the_last_reader():
    """exp(x) is read by both sums, so it lives until the second."""

    def f(x):
        e = jnp.exp(x)
        first = jax.lax.sort(e)  # sorting and products are not fused
        return first @ first.T, e @ e.T

    memory = runtime.compile(f, X).memory()
    found = {b.name: b for a in memory.allocations for b in a.buffers}
    (e,) = [b for name, b in found.items() if "exp" in name]
    readers = [n for n, name in enumerate(memory.order) if n > e.first]
    assert e.first < e.last <= readers[-1]
    assert "offset" in str(memory) and e.name in str(memory)
