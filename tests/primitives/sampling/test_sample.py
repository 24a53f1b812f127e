"""Sampling: kept sets against a NumPy oracle, frequencies, ends of the inverse CDF."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.sampling.sample import sample, sample_p
from jaxkern.testing.checks import bf16, case, f32, i32, uniform

CASES = [
    case(
        "llama3_vocab",
        logits=bf16(4, 128256, scale=3),
        uniform=uniform(4),
        temperature=uniform(4, low=0.5, high=1.5),
        top_k=i32(4, low=1, high=50),
        top_p=uniform(4, low=0.5),
        min_p=uniform(4, high=0.1),
    ),
    case(
        "odd",
        logits=f32(3, 5, 13),
        uniform=uniform(3, 5),
        temperature=uniform(3, 5, low=-0.2, high=1.5),
        top_k=i32(3, 5, low=-1, high=15),
        top_p=uniform(3, 5),
        min_p=uniform(3, 5),
    ),
    case(
        "even",
        logits=f32(8, 16),
        uniform=uniform(8),
        temperature=uniform(8),
        top_k=None,
        top_p=uniform(8),
        min_p=None,
    ),
    case(
        "plain",
        logits=f32(8, 5),
        uniform=uniform(8),
        temperature=uniform(8),
        top_k=None,
        top_p=None,
        min_p=None,
    ),
    case(
        "row",
        logits=f32(7),
        uniform=uniform(),
        temperature=uniform(),
        top_k=i32(high=7),
        top_p=None,
        min_p=uniform(),
    ),
]
INF, NAN = np.inf, np.nan
ALMOST_1 = np.float32(1 - 2.0**-24)


def distribution(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Probabilities of the kept tokens, from sorted lists as the papers define them."""
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    if top_k is not None and 0 < top_k < len(p):
        p = np.where(p >= np.sort(p)[-top_k], p, 0)
        p /= p.sum()
    if top_p is not None and top_p < 1:
        order = np.argsort(-p, kind="stable")
        reached = np.cumsum(p[order]) >= top_p
        p = np.where(p >= p[order[np.argmax(reached)]], p, 0)
        p /= p.sum()
    if min_p is not None:
        p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


def draw(logits, u, **options):
    """Tokens for each u, all with the same row of logits."""
    u = jnp.asarray(u, jnp.float32)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (*u.shape, len(logits)))
    full = dict(temperature=1.0, top_k=None, top_p=None, min_p=None) | options
    dtypes = dict(top_k=jnp.int32)
    operands = [
        None if x is None else jnp.full(u.shape, x, dtypes.get(name, jnp.float32))
        for name, x in full.items()
    ]
    return np.asarray(sample_p(rows, u, *operands))


GRID = (np.arange(4096, dtype=np.float32) + 0.5) / 4096
SETTINGS = [
    {},
    dict(temperature=0.5),
    dict(top_k=1),
    dict(top_k=3),
    dict(top_k=100),
    dict(top_k=0),
    dict(top_p=0.0),
    dict(top_p=0.3),
    dict(top_p=0.9),
    dict(top_p=1.0),
    dict(min_p=0.2),
    dict(min_p=1.0),
    dict(temperature=1.7, top_k=6, top_p=0.8, min_p=0.3),
    dict(temperature=0.7, top_k=9, top_p=0.95, min_p=0.05),
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_kept_sets_and_probabilities_match_the_oracle(options):
    for seed in range(5):
        logits = 2 * np.random.default_rng(seed).standard_normal(12)
        p = distribution(np.float32(logits), **options)
        counts = np.bincount(draw(logits, GRID, **options), minlength=12)
        assert not counts[p == 0].any()
        np.testing.assert_allclose(counts / len(GRID), p, atol=1.01 / len(GRID))


@pytest.mark.parametrize("options", [{}, SETTINGS[-1]], ids=str)
def test_frequencies_of_keys_match_the_probabilities(options):
    logits = np.random.default_rng(3).standard_normal(9)
    p = distribution(np.float32(logits), **options)
    n = 100_000
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, 9))
    ids = sample(rows, jax.random.key(0), **options)
    assert ids.shape == (n,) and ids.dtype == jnp.int32
    counts = np.bincount(ids, minlength=9)
    kept = p > 0
    assert not counts[~kept].any()
    chi2 = ((counts - n * p)[kept] ** 2 / (n * p[kept])).sum()
    assert chi2 < 26.1  # exceeded with probability below 0.001 for 8 degrees


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    logits = np.log([0.3, 0.2, 0.1, 0.2, 0.2])
    for options in (dict(top_k=2), dict(top_p=0.45), dict(min_p=2 / 3 - 1e-3)):
        assert set(draw(logits, GRID, **options)) == {0, 1, 3, 4}
    assert set(draw([1.0, 1.0, 1.0], GRID, top_k=1)) == {0, 1, 2}


def test_top_p_keeps_the_token_that_reaches_it_exactly():
    logits = [0.0, -np.log(2), -np.log(2)]  # 1/2, 1/4, 1/4
    assert set(draw(logits, GRID, top_p=0.5)) == {0}
    assert set(draw(logits, GRID, top_p=0.51)) == {0, 1, 2}


def test_top_p_sees_only_what_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(draw(logits, GRID, top_k=2, top_p=0.58)) == {0, 1}  # 0.4 / 0.7 < 0.58
    assert set(draw(logits, GRID, top_k=2, top_p=0.56)) == {0}


def test_the_ends_of_the_uniform_never_pick_a_token_of_probability_zero():
    ends = [0.0, 1e-30, ALMOST_1, 1.0]
    picked = draw([-INF, 0.0, -INF, 1.0, -INF], ends)
    np.testing.assert_array_equal(picked, [1, 1, 3, 3])
    picked = draw([-5.0, 0.0, -6.0, 1.0, -7.0], ends, top_k=2)
    np.testing.assert_array_equal(picked, [1, 1, 3, 3])


def test_a_wide_vocabulary_never_yields_a_filtered_token():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(50_000).astype(np.float32)
    logits[::2] = -INF
    u = np.concatenate([[0.0, ALMOST_1], rng.random(62)])
    assert (draw(logits, u) % 2 == 1).all()
    kept = set(np.argsort(-logits)[:7])
    assert set(draw(logits, u, top_k=7)) <= kept
    assert draw(logits, [0.0], top_k=7)[0] == min(kept)
    assert draw(logits, [ALMOST_1], top_k=7)[0] == max(kept)


def test_temperature_zero_is_argmax_per_row():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 2.0], [1.0, 3.0, 3.0, 2.0]])
    temperature = jnp.asarray([0.0, 1e6])
    for seed in range(8):
        key = jax.random.key(seed)
        ids = jax.jit(lambda t, key=key: sample(logits, key, temperature=t))(
            temperature
        )
        assert ids[0] == 1
        assert (sample(logits, key, temperature=0) == 1).all()
        assert (sample(logits, key, temperature=-1.0) == 1).all()


def test_extreme_temperatures_have_no_nan():
    logits = [0.0, 1.0, -INF, 1.0 - 1e-6]
    assert set(draw(logits, GRID, temperature=1e-38)) == {1}
    counts = np.bincount(draw(logits, GRID, temperature=INF), minlength=4)
    np.testing.assert_allclose(counts / len(GRID), [1 / 3, 1 / 3, 0, 1 / 3], atol=1e-3)
    assert set(draw([3e38, -3e38], GRID, temperature=0.1)) == {0}
    # the cuts compare logits: what the temperature makes equal is still cut
    assert set(draw([0.0, 2.0, 1.0, -INF], GRID, temperature=INF, top_k=2)) == {1, 2}
    assert set(draw([0.0, 2.0, 1.0, -INF], GRID, temperature=INF, top_p=0.3)) == {1}
    assert set(draw([0.0, INF, 5.0, INF], GRID, temperature=INF)) == {1, 3}


def test_special_logits():
    assert set(draw([0.0, INF, 5.0, INF], GRID)) == {1, 3}
    assert set(draw([NAN, 0.0, -NAN, 0.0], GRID)) == {1, 3}
    for row in ([-INF] * 3, [NAN] * 3, [-INF, NAN, -INF]):
        assert set(draw(row, GRID[::512])) == {0}
        assert set(draw(row, GRID[::512], temperature=0.0)) == {0}
        assert set(draw(row, GRID[::512], top_k=2, top_p=0.5, min_p=0.1)) == {0}


def test_a_row_does_not_depend_on_its_batch():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((6, 33)), jnp.float32)
    u = jnp.asarray(rng.random(6), jnp.float32)
    temperature = jnp.asarray([0.0, 0.3, 1.0, 1.0, 2.0, 9.0])
    top_k = jnp.asarray([0, 1, 2, 5, 40, 9])
    top_p = jnp.asarray([1.0, 0.1, 0.9, 1.0, 0.5, 0.0])
    min_p = jnp.asarray([0.0, 0.0, 0.1, 0.5, 1.0, 0.2])
    together = sample_p(logits, u, temperature, top_k, top_p, min_p)
    for i in range(6):
        row = [x[i] for x in (logits, u, temperature, top_k, top_p, min_p)]
        assert sample_p(*row) == together[i]
    vmapped = jax.vmap(sample_p)(logits, u, temperature, top_k, top_p, min_p)
    np.testing.assert_array_equal(vmapped, together)


def test_traced_options_and_static_ones_agree():
    logits = 2 * jax.random.normal(jax.random.key(1), (64, 20))
    key = jax.random.key(2)
    static = sample(logits, key, temperature=0.8, top_k=5, top_p=0.9, min_p=0.05)

    def f(temperature, top_k, top_p, min_p):
        return sample(
            logits, key, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )

    np.testing.assert_array_equal(jax.jit(f)(0.8, 5, 0.9, 0.05), static)
    off = jax.jit(f)(0.8, 0, 1.0, 0.0)
    np.testing.assert_array_equal(off, sample(logits, key, temperature=0.8))


def test_no_sort_is_compiled():
    hlo = jax.jit(
        lambda logits, key: sample(logits, key, top_k=40, top_p=0.9, min_p=0.05)
    ).lower(jnp.ones((2, 64)), jax.random.key(0))
    assert "stablehlo.sort" not in hlo.as_text()


def test_the_result_has_no_gradient():
    def loss(logits):
        return logits[sample(logits, jax.random.key(0), top_k=2)] ** 2

    grad = jax.grad(loss)(jnp.asarray([1.0, -50.0, -60.0]))
    np.testing.assert_array_equal(grad, [2, 0, 0])


def test_errors_say_what_to_do():
    logits, key = jnp.ones((2, 3)), jax.random.key(0)
    with pytest.raises(ValueError, match="sample: `top_p` must lie between 0 and 1"):
        sample(logits, key, top_p=1.5)
    with pytest.raises(ValueError, match="sample: `min_p` must lie between 0 and 1"):
        sample(logits, key, min_p=-0.1)
    with pytest.raises(ValueError, match="sample: `temperature` must be a number"):
        sample(logits, key, temperature=float("nan"))
    with pytest.raises(ValueError, match="sample: `logits` has no token to draw from"):
        sample(jnp.ones((2, 0)), key)
    with pytest.raises(TypeError, match=r"sample: `top_k` of shape \(3,\)"):
        sample(logits, key, top_k=jnp.asarray([1, 2, 3]))
