"""Triton kernels of sampling on a GPU: kept sets, tokens, frequencies, odd rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, sample
from tests.gpu.truth import on_a_gpu
from tests.sampled import check_rows, drawn, special_rows

pytestmark = on_a_gpu
INF, NAN = np.inf, np.nan
CUTS = [
    dict(),
    dict(min_p=0.05),
    dict(top_p=0.9),
    dict(top_p=0.3, min_p=0.02),
    dict(top_k=64),
    dict(top_k=64, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize(
    "v, dtype",
    [
        (1, "float32"),
        (8192, "float16"),
        (8193, "float32"),
        (50_257, "float16"),
        (128_256, "float32"),
        (128_256, "bfloat16"),
        (262_144, "bfloat16"),
    ],
)
def test_tokens_are_those_of_their_uniforms(v, dtype, cuts):
    rng = np.random.default_rng(v)
    logits = jnp.asarray(3 * rng.standard_normal((5, v)), dtype)
    u = np.float32([0, 0.3, 0.77, 1 - 2**-24, rng.random()])
    check_rows(logits, u, **cuts)
    check_rows(logits, u, temperature=np.float32([0.3, 1, 2, 0, INF]), **cuts)


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.99, 1.0])
def test_top_p_of_flat_and_of_peaked_rows(p, scale):
    rng = np.random.default_rng(1)
    logits = jnp.asarray(scale * rng.standard_normal((32, 128_256)), jnp.float32)
    check_rows(logits, rng.random(32), top_p=p)


@pytest.mark.parametrize("p", [0.5, 0.99])
def test_top_p_of_rows_with_heavy_tails(p):
    """Tokens near the cut weigh less than the sums are rounded by."""
    rng = np.random.default_rng(5)
    for _ in range(4):
        logits = jnp.asarray(rng.laplace(size=(32, 128_256)), jnp.float32)
        check_rows(logits, rng.random(32), top_p=p, temperature=0.8)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_top_p_of_other_distributions(p, dtype):
    rng = np.random.default_rng(6)
    v = 128_256
    falling = -1.1 * np.log(np.arange(v) + 3.7)
    rows = [
        rng.random(v),
        10 * rng.random(v),
        rng.gumbel(size=v),
        rng.permutation(falling),
        falling,
        np.where(np.arange(v) == 777, 10, rng.standard_normal(v)),
        2 * np.sort(rng.standard_normal(v)),
        rng.standard_normal(v) - np.linspace(0, 3, v),
    ]
    for u in (0.02, 0.6, 0.999):
        check_rows(jnp.asarray(np.stack(rows), dtype), np.full(8, u), top_p=p)


@pytest.mark.parametrize("cuts", [{"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_draws_of_one_executable_do_not_disturb_each_other(cuts):
    """They share the first launch, and each counts its programs for itself."""
    logits = 2 * jax.random.normal(jax.random.key(0), (64, 50_257))
    keys = jax.random.split(jax.random.key(1), 3)

    def together(logits, keys):
        return [sample(logits, key, **cuts) for key in keys]

    with backend("triton", strict=True):
        run = jax.jit(together)
        first = run(logits, keys)
        for _ in range(20):
            for found, expected in zip(run(logits, keys), first, strict=True):
                np.testing.assert_array_equal(found, expected)
        apart = [sample(logits, key, **cuts) for key in keys]
    for found, expected in zip(first, apart, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_rows_with_options_of_their_own():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(2 * rng.standard_normal((8, 30_001)), jnp.float32)
    top_k = np.int32([0, -1, 1, 5, 256, 257, 3000, 10**6])
    top_p = np.float32([0.9, 1, 0.5, 0.5, 0.8, 1, 0.6, 0.2])
    check_rows(logits, rng.random(8), top_k=top_k, top_p=top_p)
    check_rows(logits, rng.random(8), top_p=top_p, min_p=np.linspace(0, 1, 8))
    check_rows(logits, rng.random(8), min_p=np.linspace(0, 1.2, 8))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_whose_largest_are_side_by_side(dtype, cuts):
    """Each group of a sorted row holds larger logits than all groups before it."""
    rng = np.random.default_rng(7)
    rows = np.sort(2 * rng.standard_normal((6, 50_257)))
    rows[1::2] = rows[1::2, ::-1]
    rows[4:] = np.round(4 * rows[4:]) / 4
    check_rows(jnp.asarray(rows, dtype), rng.random(6), **cuts)


@pytest.mark.parametrize("k", [1, 2, 128, 255, 256, 257, 8000])
def test_every_size_of_top_k(k):
    rng = np.random.default_rng(k)
    for v in (300, 8200, 128_256):
        logits = jnp.asarray(rng.standard_normal((4, v)), jnp.float32)
        check_rows(logits, rng.random(4), top_k=k)
        check_rows(logits, rng.random(4), top_k=k, top_p=0.8)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("v", [100, 20_011])
def test_special_rows(v, cuts):
    x = special_rows(v)
    for u in (0.0, 0.4, 1 - 2**-24):
        numbers = np.full(8, u, np.float32)
        check_rows(jnp.asarray(x), numbers, **cuts)
        check_rows(jnp.asarray(x), numbers, temperature=0.0, **cuts)


def test_the_kept_set_is_complete():
    rng = np.random.default_rng(4)
    row = rng.standard_normal(40_000).astype(np.float32)
    logits = jnp.broadcast_to(jnp.asarray(row), (4096, 40_000))
    u = (np.arange(4096) + 0.5) / 4096
    kept = set(drawn(logits, u, top_k=20, temperature=3.0))
    assert kept == set(np.argsort(-row)[:20])
    weight = np.exp(np.float64(row) - row.max())
    kept = set(drawn(logits, u, min_p=0.5))
    assert kept == set(np.flatnonzero(weight >= 0.5))
    order = np.argsort(-row)
    share = (np.cumsum(weight[order])[29] - 0.5 * weight[order[29]]) / weight.sum()
    assert set(drawn(logits, u, top_p=share)) == set(order[:30])


def test_frequencies_match_the_probabilities():
    rng = np.random.default_rng(5)
    row = np.full(10_000, -30.0)
    row[rng.choice(10_000, 9, replace=False)] = rng.standard_normal(9)
    n = 20_000
    logits = jnp.broadcast_to(jnp.asarray(row, jnp.float32), (n, 10_000))
    for options in (dict(), dict(top_k=9), dict(top_p=0.9999), dict(min_p=1e-6)):
        with backend("triton", strict=True):
            tokens = np.asarray(sample(logits, jax.random.key(6), **options))
        p = np.exp(row) / np.exp(row).sum()
        counts = np.bincount(tokens, minlength=10_000)
        kept = row > -30
        assert counts[~kept].sum() <= 2
        chi2 = ((counts - n * p)[kept] ** 2 / (n * p[kept])).sum()
        assert chi2 < 26.1  # exceeded with probability below 0.001 for 8 degrees


def test_sampling_runs_under_vmap_and_with_no_rows():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 9000))
    keys = jax.random.split(jax.random.key(1), 2)

    def f(logits, key):
        return sample(logits, key, top_k=5, top_p=0.8)

    with backend("triton", strict=True):
        together = jax.jit(jax.vmap(f))(logits, keys)
        apart = [f(x, key) for x, key in zip(logits, keys, strict=True)]
        assert sample(logits[:, :0], keys[0]).shape == (2, 0)
    np.testing.assert_array_equal(together, jnp.stack(apart))
