"""Shares that a cluster merges in its launch: interpreted, and what is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend, paged_attention
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.cluster import MAX_EXCHANGE
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch_chain import attributes
from jaxkern.lowering.chained import in_chains
from jaxkern.triton.attention.decode import attention as rows
from tests.triton.attention.test_decode_attention import launches_of, qkv
from tests.triton.clusters import in_a_cluster
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    starts_it,
)

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def drawn(*shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.standard_normal(shape), jnp.float16)


CASES = {
    "all keys": (dict(), None, None),
    "lengths": (dict(causal=True), [300, 17], [299, 16]),
    "no keys": (dict(causal=True), [0, 130], [0, 129]),
    "window": (dict(causal=True, window=150), [300, 299], [297, 296]),
    "sinks": (dict(causal=True, sinks=True), [300, 0], [299, 0]),
}


ONE, SEVERAL = (1, 4, 64, 64), (3, 3, 80, 37)  # t, g, h, hv: of odd dims, too
NOT_SEEN = ("window", "sinks")  # which keys depends on the query, or none at all


@alone
@pytest.mark.parametrize(
    "name, t, g, h, hv",
    [(name, *ONE) for name in CASES]
    + [
        pytest.param(name, *SEVERAL, marks=[pytest.mark.full] * (name not in NOT_SEEN))
        for name in CASES
    ],
)
def test_a_cluster_computes_what_the_reference_does(t, g, h, hv, name, monkeypatch):
    options, lengths, offsets = CASES[name]
    k, s = 2, 300
    q, keys = drawn(2, t, k * g, h), drawn(2, s, k, h, seed=1)
    values = drawn(2, s, k, hv, seed=2)
    sinks = drawn(k * g, seed=3).astype(jnp.float32) if options.get("sinks") else None
    lengths, offsets = (
        None if x is None else jnp.array(x, jnp.int32) for x in (lengths, offsets)
    )
    given = {"scale": 0.2, "causal": False, "window": None, "softcap": None}
    given |= {n: x for n, x in options.items() if n != "sinks"}
    run = lambda *x: rows.launch(*x, None, lengths, offsets, sinks, **given)  # noqa: E731
    (out, lse), [(cluster, constants)] = in_a_cluster(monkeypatch, run, q, keys, values)
    assert 2 < cluster == constants["SPLITS"]
    with backend("xla"):
        want = attention(
            q,
            keys,
            values,
            kv_lengths=lengths,
            q_offset=offsets,
            sinks=sinks,
            return_lse=True,
            **given,
        )
    for got, y in zip((out, lse), want, strict=True):
        np.testing.assert_allclose(np.float64(got), np.float64(y), rtol=4e-3, atol=2e-3)


@starts_it
def test_clusters_in_the_interpreter():
    check_in_its_own_process(__file__, len(CASES) + len(NOT_SEEN))


@starts_it
@pytest.mark.full
def test_clusters_of_several_tokens_in_the_interpreter():
    check_in_its_own_process(__file__, len(CASES) - len(NOT_SEEN), "full")


@starts_it
@pytest.mark.parametrize(
    "s, h, cluster, block",
    [
        (128, 64, 1, 128),
        (640, 64, 5, 128),
        (1024, 64, 8, 128),
        (1025, 64, 5, 256),
        (2048, 64, 8, 256),
        (640, 128, 5, 128),
        (512, 128, 8, 64),
        (512, 256, 8, 64),
    ],
)
def test_short_contexts_are_one_launch(s, h, cluster, block):
    """A program of a cluster has one block, of 64 KB at most."""
    with compiling_for(90):
        [launch] = launches_of(attention, *qkv(1, 1, s, 8, 4, h))
        constants = dict(launch.constants)
        assert (launch.cluster, constants["BLOCK"]) == (cluster, block)
        assert launch.grid == (8 * cluster,) and constants["EXCHANGE"] <= MAX_EXCHANGE
        assert launch.stack_bytes == 0
        assert launch.ptx.count(".shared .align 16 .b8 exchange") == (cluster > 1)


@starts_it
def test_longer_contexts_and_older_gpus_have_a_second_launch():
    with compiling_for(90):
        assert len(launches_of(attention, *qkv(1, 1, 4096, 8, 4, 128))) == 2
        assert len(launches_of(attention, *qkv(1, 1, 640, 8, 4, 64, jnp.float32))) == 2
    with compiling_for(80):
        assert len(launches_of(attention, *qkv(1, 1, 640, 8, 4, 64))) == 2


@starts_it
def test_pages_in_a_cluster():
    query, pages, _ = qkv(1, 1, 16, 8, 4, 64)
    pages = jnp.zeros((50, *pages.shape[1:]), pages.dtype)
    tables, lengths = jnp.zeros((1, 40), jnp.int32), jnp.array([600])
    with compiling_for(90):
        [launch] = launches_of(paged_attention, query, pages, pages, tables, lengths)
        assert launch.cluster == 5 and launch.shared_bytes > 0


@starts_it
def test_memory_that_must_be_asked_for_is():
    """48 KB with what the kernel declares; launchers ask by their own part alone."""
    with compiling_for(90):
        [small] = launches_of(attention, *qkv(1, 1, 300, 8, 4, 64))
        assert small.dynamic_bytes == small.shared_bytes < 48 << 10
        [large] = launches_of(attention, *qkv(1, 1, 640, 8, 4, 128))
        assert large.dynamic_bytes > 48 << 10


@starts_it
def test_a_chain_says_how_many_programs_are_a_cluster():
    """And lengths that the chain does not write may be read early."""

    def f(q, keys, values, lengths):
        for _ in range(2):
            q = attention(q, keys, values, kv_lengths=lengths)
        return q

    operands = *qkv(1, 1, 640, 8, 4, 64), jnp.array([600])
    with compiling_for(90):
        closed = jax.make_jaxpr(f)(*operands)
        jaxpr = jax.make_jaxpr(lambda *x: in_chains(*x, jaxpr=closed))(*operands)
        [chain] = [e for e in jaxpr.eqns if e.primitive.name == "launch_chain"]
        program = attributes(chain.params["steps"], len(chain.invars))["program"]
    # kernel, grid, whether it may begin early, cluster, pointers
    first, count = program[:7], int(program[6])
    assert list(first[1:7]) == [40, 1, 1, 0, 5, 6]
    assert list(program[7 + 2 * count :][1:7]) == [40, 1, 1, 1, 5, 6]
