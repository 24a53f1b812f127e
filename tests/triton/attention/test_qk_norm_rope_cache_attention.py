"""The kernel of a decode step's attention: interpreted, and what is compiled for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import NormRope, backend, explain, qk_norm_rope_cache_attention
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.cluster import MAX_EXCHANGE
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.lowering.chained import in_chains
from jaxkern.primitives.rope.rope import rotary_tables
from jaxkern.triton.attention import qk_norm_rope_cache_attention as rows
from jaxkern.triton.attention import qk_norm_rope_cache_attention_kernel as kernel
from tests.triton.clusters import in_a_cluster
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def operands(b, s, k, g, h, hv, pairs=None, weights=False, dtype="float16", seed=0):
    """Of one token each, up to the caches."""
    rng = np.random.default_rng([seed, b, s, h])

    def draw(*shape, of=dtype):
        return jnp.asarray(rng.standard_normal(shape), of)

    angle = rng.standard_normal((b, 1, pairs or h // 2))
    tables = jnp.float32(np.cos(angle)), jnp.float32(np.sin(angle))
    norms = (draw(h), draw(h)) if weights else (None, None)
    new = draw(b, 1, k * g, h), draw(b, 1, k, h), draw(b, 1, k, hv)
    return *new, norms, tables, draw(b, s, k, h), draw(b, s, k, hv)


TURN = ("eps", "value_eps", "offset", "pairing", "pair_offset", "at_end")


def with_record(options):
    """Options of the operator, given those that its kernel has one by one."""
    turn = {name: options[name] for name in TURN if name in options}
    rest = {name: x for name, x in options.items() if name not in TURN}
    return rest | {"norm_rope": NormRope(**turn)}


BARE = NormRope(eps=None)
LLAMA = dict(eps=None, pairing="interleaved")
QWEN = dict(eps=1e-6, weights=True)
CASES = {  # s, g, h, hv, positions, new_lengths, options
    "one block": (60, 4, 64, 64, [59, 0], None, LLAMA),
    "a cluster": (300, 4, 64, 64, [299, 130], None, LLAMA),
    "norms of heads": (300, 3, 80, 37, [299, 17], None, QWEN | {"offset": 1.0}),
    "norms of values": (60, 2, 32, 37, [59, 0], None, QWEN | {"value_eps": 0.5}),
    "rows that do not count": (300, 2, 64, 64, [200, 200], [0, 1], LLAMA),
    "too many, too few": (60, 2, 64, 64, [9, 9], [5, -5], LLAMA),
    "outside of the cache": (140, 2, 64, 64, [140, -3], None, LLAMA),
    "larger blocks": (1500, 1, 64, 64, [1499, 700], None, QWEN | {"window": 900}),
    "a window": (300, 4, 64, 64, [299, 20], None, LLAMA | {"window": 100}),
    "sinks": (300, 4, 64, 64, [299, 0], [1, 0], LLAMA | {"sinks": True}),
    "sinks, one block": (100, 4, 64, 64, [99, 0], [1, 0], LLAMA | {"sinks": True}),
    "gates": (300, 3, 80, 37, [299, 17], None, QWEN | {"gated": True}),
    "gates, one block": (60, 2, 64, 64, [59, 0], None, QWEN | {"gated": True}),
    "pairs apart": (150, 2, 64, 64, [149, 3], None, QWEN | {"pair_offset": 32}),
}
TWO_LAUNCHES = [  # which of the sequences, and whether a program has one block
    ("norms of heads", 0, False),
    ("pairs apart", 0, True),
    *(("rows that do not count", 0, held) for held in (True, False)),
    *(("outside of the cache", 1, held) for held in (True, False)),
    *(("sinks", 1, held) for held in (True, False)),
]


def case(name, rows=slice(None)):
    """Operands of the kernel, and its options, of some of a case's two sequences."""
    s, g, h, hv, positions, lengths, options = CASES[name]
    k, options = 2, dict(options)
    pairs = 8 if "pair_offset" in options else None
    given = operands(2, s, k, g, h, hv, pairs, options.pop("weights", False))
    if options.get("gated"):
        gates = np.random.default_rng(s).standard_normal((2, 1, k * g, hv))
        both = jnp.concatenate([given[0], jnp.asarray(gates, given[0].dtype)], -1)
        given = both, *given[1:]
    sinks = jnp.linspace(-1.0, 3.0, k * g) if options.pop("sinks", False) else None
    lengths = None if lengths is None else jnp.array(lengths)[rows]
    query, key, value, norms, tables, *caches = given
    cos, sin, apart = rotary_tables(
        name, key, *tables, "neox", options.pop("pair_offset", None)
    )
    options = dict(offset=0.0, at_end=False, pairing="neox") | options
    options |= dict(pair_offset=apart, scale=0.2)
    options = dict(window=None, softcap=None, value_eps=None, gated=False) | options
    new = *(x[rows] for x in (query, key, value)), *norms, cos[rows], sin[rows]
    last = *(x[rows] for x in caches), jnp.array(positions)[rows], lengths, sinks
    return (*new, *last), options


def compare(found, given, options):
    query, key, value, *norms, cos, sin = given[:7]
    if options["pairing"] == "interleaved":
        del options["pair_offset"]
    with backend("xla"):
        want = qk_norm_rope_cache_attention(
            *(query, key, value, tuple(norms), (cos, sin), *given[7:]),
            **with_record(options),
        )
    for y, expected, slack in zip(found, want, (4e-3, 2e-3, 0), strict=True):
        y, expected = np.float64(y), np.float64(expected)
        np.testing.assert_allclose(y, expected, rtol=slack, atol=slack)


@alone
@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_reference_does(name, monkeypatch):
    given, options = case(name)
    run = functools.partial(rows.qk_norm_rope_cache_attention, **options)
    found, [(cluster, constants)] = in_a_cluster(
        monkeypatch, run, *given, kernel=kernel
    )
    s = given[7].shape[1]
    assert constants["SPLITS"] == cluster and (cluster > 1) == (s > 128)
    compare(found, given, options)


@alone
@pytest.mark.parametrize("name, row, held", TWO_LAUNCHES)
def test_shares_of_a_long_cache_are_merged(name, row, held, monkeypatch):
    given, options = case(name, slice(row, row + 1))
    launched = []

    def noted(f, *more, **named):
        launched.append(f.__name__)
        return sparse_call(f, *more, **named)

    monkeypatch.setattr(rows, "in_one_launch", lambda *_: None)
    monkeypatch.setattr(rows, "sparse_call", noted)
    if not held:
        monkeypatch.setattr(rows, "AT_ONCE", 0)
        monkeypatch.setattr(rows, "num_splits", lambda *_: 2)
    with interpreted(), compiling_for(90):
        found = rows.qk_norm_rope_cache_attention(*given, **options)
    assert launched == ["qk_norm_rope_cache_shares_kernel"]
    compare(found, given, options)


@starts_it
def test_in_the_interpreter():
    check_in_its_own_process(__file__, len(CASES) + len(TWO_LAUNCHES))


def launches_of(s, b=1, k=8, g=4, h=64, dtype="bfloat16", t=1, window=None):
    given = operands(b, s, k, g, h, h, dtype=dtype)
    given = jax.tree.map(
        lambda x: jnp.repeat(x, t, axis=1) if x.shape[1:2] == (1,) else x, given
    )
    f = functools.partial(qk_norm_rope_cache_attention, norm_rope=BARE, window=window)
    [row] = explain(f, *given, jnp.zeros(b, int), platform="cuda").rows
    assert row.runs.startswith("triton")
    return row.launches


@starts_it
@pytest.mark.parametrize(
    "s, h, cluster, block",
    [
        (128, 64, 1, 128),
        (641, 64, 6, 128),
        (1025, 64, 5, 256),
        (2048, 64, 8, 256),
        (641, 128, 6, 128),
        (512, 256, 8, 64),
        (300, 80, 5, 64),
    ],
)
def test_a_decode_step_is_one_launch(s, h, cluster, block):
    with compiling_for(90):
        [launch] = launches_of(s, h=h)
        found = dict(launch.constants)
        assert launch.cluster == cluster and launch.grid == (8 * cluster,)
        assert found["BLOCK"] == block
        assert found["EXCHANGE"] <= MAX_EXCHANGE and launch.stack_bytes == 0


@starts_it
@pytest.mark.parametrize(
    "options",
    [
        dict(s=2049, b=2),
        dict(s=1025, h=256),
        dict(s=8064, window=512),
        dict(s=3000, h=128),
        dict(s=641, b=64),
        dict(s=641, t=2),
        dict(s=641, dtype="float32"),
        dict(s=641, g=17),
    ],
    ids=str,
)
def test_what_does_not_fit_is_written_and_then_read(options):
    with compiling_for(90):
        names = [launch.name for launch in launches_of(**options)]
    assert names[0] == "qk_norm_rope_cache_kernel" and len(names) > 1


@starts_it
@pytest.mark.parametrize(
    "s, h, shares, held",
    [
        (2049, 64, 17, True),
        (8064, 64, 63, True),
        (8064, 80, 16, False),
        (8064, 128, 16, False),
        (40000, 64, 16, False),
    ],
)
def test_a_long_cache_is_two_launches(s, h, shares, held):
    with compiling_for(90):
        launch, merge = launches_of(s, h=h)
        assert launch.stack_bytes == 0
    found = dict(launch.constants)
    assert launch.name == "qk_norm_rope_cache_shares_kernel"
    assert merge.name == "merge_kernel"
    assert launch.grid == (8 * shares,) and found["BLOCK"] == 128
    assert found["HELD"] == held


@starts_it
def test_older_gpus_write_and_then_read():
    with compiling_for(80):
        assert len(launches_of(641)) > 1 == len(launches_of(100))


@starts_it
def test_in_a_chain_keys_are_loaded_before_the_product_has_ended():
    given = operands(1, 641, 8, 4, 64, 64, dtype="bfloat16")
    f = functools.partial(qk_norm_rope_cache_attention, norm_rope=BARE)

    def two_layers(query, *rest):
        *new, key_cache, value_cache, more_keys, more_values, positions = rest
        out, *first = f(query, *new, key_cache, value_cache, positions)
        return f(out, *new, more_keys, more_values, positions), first

    caches = given[-2:]
    arrays = *given, *caches, jnp.array([600])
    with compiling_for(90):
        closed = jax.make_jaxpr(two_layers)(*arrays)
        leaves = jax.tree.leaves(arrays)
        jaxpr = jax.make_jaxpr(lambda *x: in_chains(*x, jaxpr=closed))(*leaves)
        [chain] = [e for e in jaxpr.eqns if e.primitive.name == "launch_chain"]
    steps = chain.params["steps"]
    assert [s.launch.name for s in steps] == ["qk_norm_rope_cache_attention_kernel"] * 2
    assert len(chain.params["aliases"]) == 4
