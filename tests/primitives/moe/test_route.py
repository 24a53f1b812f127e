"""route against Python loops, the models' own formulas, ties and orders of scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import linear, rms_norm, route
from jaxkern.testing.checks import bf16, case, f32, uniform

DEEPSEEK = dict(score="sigmoid", num_groups=4, top_groups=2, group_score="top2")

CASES = [
    case("plain", logits=f32(4, 16), per_expert_scale=uniform(16, low=0.5), k=3),
    case(
        "deepseek",
        logits=f32(8, 16),
        correction_bias=f32(16, scale=0.1),
        k=3,
        **DEEPSEEK,
        scaling_factor=2.5,
    ),
    case("one", logits=f32(8), k=1, score="sigmoid", normalize=False),
    case("given", logits=uniform(6, 8, low=0.1), k=3, score="given"),
    case("empty", logits=f32(0, 8), k=2),
    case("qwen3_30b", logits=bf16(64, 128), k=8, full=True),
]


def oracle(logits, k, scale=None, renorm=False, normalize=True):
    """One token at a time, in float64: (weights, ids) of a softmax router."""
    out = []
    for row in np.float64(logits):
        p = np.exp(row - row.max())
        p /= p.sum()
        ids = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        w = p[ids]
        if normalize:
            w = w / w.sum()
        if scale is not None:
            w = w * scale[ids]
        out.append((w / w.sum() if renorm else w, ids))
    return [np.asarray(column) for column in zip(*out, strict=True)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("renorm", [True, False])
def test_order_of_scale_and_normalisation(normalize, renorm):
    """`moe_gate` scales, then normalises; `fused_moe_routing` the other way round."""
    rng = np.random.default_rng(0)
    logits, scale = rng.standard_normal((6, 16)), rng.uniform(0.5, 2, 16)
    call = lambda: route(  # noqa: E731
        jnp.float32(logits),
        4,
        normalize=normalize,
        per_expert_scale=jnp.float32(scale),
        scale_then_renorm=renorm,
    )
    if renorm and not normalize:
        with pytest.raises(ValueError, match="route: `scale_then_renorm` needs"):
            call()
        return
    weights, ids = call()
    expected, expected_ids = oracle(np.float32(logits), 4, scale, renorm, normalize)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    sums = np.float64(weights).sum(-1)
    assert np.allclose(sums, 1, atol=1e-6) == renorm


def test_the_gate_of_gemma_is_a_composition():
    """rms_norm, linear, route: `moe_gate` with its order, in float64."""
    rng = np.random.default_rng(0)
    hidden, router, norm = (rng.standard_normal(s) for s in [(5, 8), (16, 8), 8])
    scale = rng.uniform(0.5, 2, 16)
    with jax.enable_x64(True):
        logits = linear(rms_norm(hidden, norm, eps=1e-6), router)
        weights, ids = route(logits, 2, per_expert_scale=scale, scale_then_renorm=True)
    h = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6) * norm
    expected, expected_ids = oracle(h @ router.T, 2, scale, renorm=True)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


def test_ties_go_to_the_smaller_id():
    weights, ids = route(jnp.asarray([[1.0, 2.0, 1.0, 2.0, 1.0]]), 3)
    np.testing.assert_array_equal(ids, [[1, 3, 0]])
    e = np.exp(-1)
    np.testing.assert_allclose(weights, np.asarray([[1, 1, e]]) / (2 + e), rtol=1e-6)


def test_scores_that_underflow_keep_their_order_and_ratio():
    """A softmax over all experts gives 0 for each of these; its quotient is NaN."""
    logits = jnp.asarray([200.0, 1.0, 0.0, 2.0])
    bias = jnp.asarray([-10.0, 0.0, 0.0, 0.0])
    weights, ids = route(logits, 2, correction_bias=bias)
    np.testing.assert_array_equal(ids, [1, 2])  # scores 0: the bias decides
    np.testing.assert_allclose(weights, [1 / (1 + np.exp(-1)), 1 / (1 + np.e)], 1e-6)
    _, ids = route(logits, 4)
    np.testing.assert_array_equal(ids, [0, 3, 1, 2])


def test_deepseek_v3():
    """The groups and the correction bias choose, the sigmoids weigh."""
    rng = np.random.default_rng(1)
    logits, bias = rng.standard_normal((20, 16)), 0.3 * rng.standard_normal(16)
    weights, ids = route(
        jnp.float32(logits),
        3,
        **DEEPSEEK,
        correction_bias=jnp.float32(bias),
        scaling_factor=2.5,
    )
    for row, w, chosen in zip(logits, weights, ids, strict=True):
        s = 1 / (1 + np.exp(-row))
        groups = (s + bias).reshape(4, 4)
        best = np.argsort(-np.sort(groups)[:, -2:].sum(-1))[:2]
        allowed = [i for i in range(16) if i // 4 in best]
        expected = sorted(allowed, key=lambda i: -(s + bias)[i])[:3]
        np.testing.assert_array_equal(chosen, expected)
        np.testing.assert_allclose(w, 2.5 * s[expected] / s[expected].sum(), rtol=1e-5)


def test_a_group_counts_by_its_best_expert():
    logits = jnp.asarray([9.0, 0.0, 5.0, 6.0, 0.0, 7.0])
    options = dict(num_groups=3, top_groups=2)
    _, ids = route(logits, 4, **options)
    np.testing.assert_array_equal(ids, [0, 5, 1, 4])


def test_experts_outside_the_groups_have_no_weight():
    """Where a chosen group has too few experts that are not -inf."""
    logits = jnp.asarray([1.0, 2.0, 9.0, -jnp.inf])
    weights, _ = route(logits, 2, num_groups=2, top_groups=1)
    np.testing.assert_array_equal(weights, [1.0, 0.0])


def test_bias_has_no_gradient_and_logits_have_the_formulas():
    rng = np.random.default_rng(2)
    logits, dw = rng.standard_normal(8), rng.standard_normal(3)

    def loss(logits, bias, **options):
        weights, _ = route(logits, 3, correction_bias=bias, **options)
        return (weights * jnp.float32(dw)).sum()

    bias = jnp.float32(rng.standard_normal(8))
    x = jnp.float32(logits)
    dlogits, dbias = jax.grad(loss, (0, 1))(x, bias)
    w, ids = map(np.asarray, route(x, 3, correction_bias=bias))
    expected = np.zeros(8)
    expected[ids] = w * (dw - (w * dw).sum())
    np.testing.assert_allclose(dlogits, expected, rtol=1e-4, atol=1e-7)
    assert not np.any(dbias)
    dlogits = jax.grad(loss)(x, bias, score="sigmoid", normalize=False)
    s = 1 / (1 + np.exp(-logits))
    s_and_bias = s + np.asarray(bias)
    ids = np.argsort(-s_and_bias)[:3]
    expected = np.zeros(8)
    expected[ids] = dw * s[ids] * (1 - s[ids])
    np.testing.assert_allclose(dlogits, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("normalize", [True, False])
def test_given_scores_are_taken_as_they_are(normalize):
    """sqrt(softplus), which no other score gives; groups, bias and a masked expert."""
    rng = np.random.default_rng(3)
    logits, bias = rng.standard_normal((20, 16)), 0.3 * rng.standard_normal(16)
    scores = np.sqrt(np.log1p(np.exp(logits)))
    scores[:, 5] = -np.inf
    options = dict(num_groups=4, top_groups=2, group_score="top2", scaling_factor=2.5)

    def f(scores):
        return route(
            scores,
            3,
            score="given",
            normalize=normalize,
            correction_bias=jnp.asarray(bias),
            **options,
        )

    dw = rng.standard_normal((20, 3))
    with jax.enable_x64(True):
        weights, vjp, ids = jax.vjp(f, jnp.asarray(scores), has_aux=True)
        (dscores,) = vjp(jnp.asarray(dw))
    for n, s in enumerate(scores):
        groups = (s + bias).reshape(4, 4)
        best = np.argsort(-np.sort(groups)[:, -2:].sum(-1))[:2]
        allowed = [i for i in range(16) if i // 4 in best]
        chosen = sorted(allowed, key=lambda i: -(s + bias)[i])[:3]
        np.testing.assert_array_equal(ids[n], chosen)
        total = s[chosen].sum() if normalize else 1.0
        w = 2.5 * s[chosen] / total
        np.testing.assert_allclose(weights[n], w, rtol=1e-12)
        expected = np.zeros(16)
        expected[chosen] = 2.5 * dw[n] / total
        if normalize:
            expected[chosen] -= (dw[n] * w).sum() / total
        np.testing.assert_allclose(dscores[n], expected, rtol=1e-10, atol=1e-12)


def test_given_scores_of_minus_infinity_and_zero_weigh_nothing():
    x = jnp.asarray([[-jnp.inf, -jnp.inf, 2.0], [0.0, 0.0, 0.0]])
    weights, ids = route(x, 2, score="given")
    np.testing.assert_array_equal(weights, [[1, 0], [0, 0]])
    np.testing.assert_array_equal(ids, [[2, 0], [0, 1]])
    assert np.isfinite(jax.grad(lambda x: route(x, 2, score="given")[0].sum())(x)).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_masked_experts_have_finite_gradients(score, normalize):
    logits = jnp.asarray([[1.0, -jnp.inf, 0.5, -jnp.inf], [-jnp.inf] * 4])

    @jax.jit
    def f(x):
        return (route(x, 3, score=score, normalize=normalize)[0] ** 2).sum()

    weights, _ = route(logits, 3, score=score, normalize=normalize)
    assert np.all(weights[1] == 0) and np.all(weights[0, :2] > 0) and not weights[0, 2]
    gradient = jax.grad(f)(logits)
    assert np.isfinite(gradient).all() and np.any(gradient[0, 0] != 0)
    slope = jax.jit(jax.grad(f))
    assert np.isfinite(jax.jvp(slope, (logits,), (jnp.ones((2, 4)),))[1]).all()


def test_errors_say_what_to_do():
    x = jnp.ones((2, 8))
    for options, message in [
        (dict(k=9), "`k` must lie between 0 and the 8 experts of 1 of 1 groups"),
        (dict(k=3, num_groups=4), "and the 2 experts of 1 of 4 groups, got 3"),
        (dict(k=1, num_groups=3), "`num_groups` must divide the 8 experts, got 3"),
        (dict(k=1, top_groups=2), "`top_groups` must lie between 1 and the 1 groups"),
        (dict(k=1, score="tanh"), "`score` must be 'softmax' or 'sigmoid', got 'tanh'"),
        (dict(k=1, group_score="sum"), "`group_score` must be 'max' or 'top2'"),
    ]:
        with pytest.raises(ValueError, match=f"route: .*{message}"):
            route(x, **options)
