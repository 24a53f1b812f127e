"""cut_logits: kept sets by sorted lists as the papers say, values, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import cut_logits, sample
from jaxkern.testing.checks import bf16, case, f32, i32, uniform

NO_CUT = dict.fromkeys(("top_k", "top_p", "min_p", "typical_p", "epsilon", "eta"))
CASES = [
    case("plain", logits=f32(8, 5), temperature=uniform(8, low=0.5), **NO_CUT),
    case(
        "every_cut",
        logits=f32(8, 16),
        temperature=uniform(8, low=0.5),
        top_k=i32(8, low=4, high=20),
        top_p=uniform(8, low=0.8),
        min_p=uniform(8, high=0.05),
        typical_p=uniform(8, low=0.7),
        epsilon=uniform(8, high=0.1),
        eta=uniform(8, high=0.1),
    ),
    case(  # of which the others leave nothing
        "min_p_and_eta",
        logits=f32(8, 6),
        temperature=uniform(8, low=0.5),
        **NO_CUT
        | {
            "min_p": uniform(8, low=0.05, high=0.2),
            "eta": uniform(8, low=0.3, high=0.9),
        },
    ),
    case(
        "llama3_vocab",
        full=True,
        logits=bf16(4, 128256, scale=3),
        temperature=uniform(4, low=0.5),
        **NO_CUT | {"typical_p": uniform(4, low=0.5), "eta": uniform(4, high=1e-3)},
    ),
]
INF, NAN = np.inf, np.nan
SETTINGS = [
    dict(),
    dict(temperature=0.5),
    dict(top_k=3),
    dict(top_p=0.6),
    dict(min_p=0.2),
    dict(typical_p=0.5),
    dict(typical_p=0.9),
    dict(typical_p=1.0),
    dict(typical_p=0.0),
    dict(epsilon=0.1),
    dict(epsilon=1.0),
    dict(eta=0.1),
    dict(eta=0.9),
    dict(temperature=1.5, top_k=9, top_p=0.95, min_p=0.02, typical_p=0.8),
    dict(temperature=0.8, top_k=9, typical_p=0.9, epsilon=0.05, eta=0.2),
]


def kept_tokens(logits, temperature=1.0, **cuts):
    """Which tokens are left, one cut after the other, in float64."""
    z = np.asarray(logits, np.float64) / temperature
    kept = np.ones(len(z), bool)

    def shares():
        p = np.where(kept, np.exp(z - z[kept].max()), 0)
        return p / p.sum()

    def entropy(p):
        return -sum(q * np.log(q) for q in p if q > 0)

    def smallest_set(order, p, share):
        """The first of `order` that reach the share."""
        reached = np.cumsum(p[order]) >= share
        return order[: 1 + (np.argmax(reached) if reached.any() else len(p))]

    for name, value in cuts.items():
        p = shares()
        if name == "top_k":
            kept &= z >= np.sort(z[kept])[-min(value, kept.sum())]
        elif name == "top_p" and value < 1:
            kept &= np.isin(np.arange(len(z)), smallest_set(np.argsort(-p), p, value))
        elif name == "min_p":
            kept &= p >= value * p.max()
        elif name == "typical_p" and value < 1:
            with np.errstate(divide="ignore"):
                distance = abs(-np.log(p) - entropy(p))
            order = np.argsort(distance, kind="stable")
            kept &= np.isin(np.arange(len(z)), smallest_set(order, p, value))
        elif name == "epsilon":
            kept &= (p >= value) | (p == p.max())
        elif name == "eta":
            least = min(value, np.sqrt(value) * np.exp(-entropy(p)))
            kept &= (p >= least) | (p == p.max())
    return kept


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_the_papers_keep_the_same_tokens(options):
    logits = 2 * np.random.default_rng(0).standard_normal((40, 12))
    y = jax.jit(lambda x: cut_logits(x, **options))(jnp.float32(logits))
    sizes = set()
    for row, values in zip(np.float32(logits), np.asarray(y), strict=True):
        kept = kept_tokens(row, **options)
        np.testing.assert_array_equal(values > -INF, kept)
        scaled = row / np.float32(options.get("temperature", 1))
        np.testing.assert_allclose(values[kept], scaled[kept], rtol=1e-6)
        sizes.add(int(kept.sum()))
    cuts = {n: v for n, v in options.items() if n != "temperature"}
    assert (sizes == {12}) == (cuts in ({}, dict(typical_p=1.0)))


def test_options_of_each_row_and_of_none():
    logits = jnp.float32(np.random.default_rng(1).standard_normal((3, 9)))
    shares = dict(typical_p=[0.3, 1.0, 0.7], eta=[0.0, 0.4, 0.2], epsilon=[0.2, 0, 0])
    y = cut_logits(logits, **{n: jnp.asarray(v) for n, v in shares.items()})
    for i in range(3):
        one = cut_logits(logits[i], **{n: v[i] for n, v in shares.items()})
        np.testing.assert_array_equal(y[i], one)
    np.testing.assert_array_equal(cut_logits(logits), logits)


def test_far_tokens_nan_infinities_and_no_temperature():
    """Without a cut a token stays whose weight underflows, 200 below the best."""
    row = jnp.asarray([0.0, 200.0, NAN, -INF])
    np.testing.assert_array_equal(cut_logits(row), [0, 200, -INF, -INF])
    np.testing.assert_array_equal(
        cut_logits(row, temperature=0.0), [-INF, 200, -INF, -INF]
    )
    row = jnp.asarray([INF, 1.0, INF])
    cuts = dict(top_p=0.9, typical_p=0.9, eta=0.1)
    np.testing.assert_array_equal(cut_logits(row, **cuts), [INF, -INF, INF])
    nothing = jnp.full(3, -INF)
    np.testing.assert_array_equal(cut_logits(nothing, **cuts), nothing)
    assert cut_logits(jnp.zeros((2, 0)), **cuts).shape == (2, 0)


def test_the_gradient_reaches_what_is_kept():
    logits = jnp.asarray([3.0, 2.0, 1.0, -INF])

    def f(x, temperature):
        y = cut_logits(x, temperature=temperature, top_k=2)
        return jnp.where(y > -INF, y, 0).sum()

    dx, dt = jax.grad(f, (0, 1))(logits, 0.5)
    np.testing.assert_allclose(dx, [2, 2, 0, 0])
    np.testing.assert_allclose(dt, -(3 + 2) / 0.5**2, rtol=1e-6)


@pytest.mark.parametrize(
    "cuts", [dict(typical_p=0.6), dict(epsilon=0.15), dict(eta=0.4, top_k=5)], ids=str
)
def test_sample_draws_from_the_kept_tokens_by_their_shares(cuts):
    """At a temperature by which dividing would overflow, too."""
    row = np.random.default_rng(2).standard_normal(8).astype(np.float32)
    rows = jnp.broadcast_to(row, (20000, 8))
    tokens = np.asarray(sample(rows, jax.random.key(0), temperature=0.7, **cuts))
    kept = kept_tokens(row, temperature=0.7, **dict(sorted(cuts.items())[::-1]))
    p = np.where(kept, np.exp(row / 0.7), 0)
    p /= p.sum()
    np.testing.assert_allclose(np.bincount(tokens, minlength=8) / 20000, p, atol=0.015)
    assert not np.any(~kept[tokens])
    large = jnp.asarray([-30.0, -10.0, -20.0])
    assert sample(large, jax.random.key(0), temperature=1e-38, **cuts) == 1
    temperature = jnp.asarray([0.0, 1e-38])
    both = sample(jnp.stack([large] * 2), jax.random.key(0), temperature=temperature,
                  **cuts)  # fmt: skip
    np.testing.assert_array_equal(both, [1, 1])


def test_errors_say_what_to_do():
    x, key = jnp.ones((2, 3)), jax.random.key(0)
    for name in ("top_p", "min_p", "typical_p", "epsilon", "eta"):
        with pytest.raises(ValueError, match=f"cut_logits: `{name}` must lie between"):
            cut_logits(x, **{name: 1.5})
        with pytest.raises(ValueError, match=f"sample: `{name}` must lie between 0"):
            sample(x, key, **{name: -0.5})
    with pytest.raises(TypeError, match=r"cut_logits: `eta` of shape \(3,\) must be a"):
        cut_logits(x, eta=jnp.ones(3))
