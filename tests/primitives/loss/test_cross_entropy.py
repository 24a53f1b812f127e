"""cross_entropy: the formula, PyTorch's and optax's values, -inf, ignored tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkern import cross_entropy, linear_cross_entropy
from jaxkern.testing.checks import bf16, case, f32, i32
from tests.golden.torch_losses_vision import assert_equals_torch

EVERY = dict(label_smoothing=0.1, z_loss=0.01, softcap=3.0, ignore_index=2)
PLAIN = dict(label_smoothing=0.0, z_loss=0.0, softcap=None, ignore_index=None)
CASES = {
    "cross_entropy": [
        case("plain", full=True, logits=f32(4, 11), labels=i32(4, high=11)),
        case(
            "every_option",
            logits=f32(2, 8, 5, scale=2),
            labels=i32(2, 8, high=5),
            **EVERY,
        ),
        case("bf16_one_token", logits=bf16(9), labels=i32(high=9), z_loss=1e-3),
        case(
            "gemma2_2b",
            full=True,
            logits=bf16(16, 256000),
            labels=i32(16, high=256000),
            softcap=30.0,
            ulps=16,
        ),
    ],
    "weighted_cross_entropy": [
        case(
            "every_option",
            logits=f32(2, 8, 5, scale=2),
            labels=i32(2, 8, high=5),
            weight=f32(2, 8),
            **EVERY,
        ),
        case(
            "bf16",
            logits=bf16(3, 17),
            labels=i32(3, high=17),
            weight=f32(3),
            **PLAIN,
        ),
        case(
            "llama3_8b",
            full=True,
            logits=bf16(16, 128256),
            labels=i32(16, high=128256),
            weight=f32(16),
            **PLAIN,
            ulps=16,
        ),
    ],
}
LABELS = jnp.array([3, 0, -100, 6, 2])


def formula(logits, labels, e=0.0, z_loss=0.0, cap=None, ignore=-100):
    """One token at a time, in float64."""
    losses = []
    for x, label in zip(np.asarray(logits, np.float64), labels, strict=True):
        z = x if cap is None else cap * np.tanh(x / cap)
        lse = np.log(np.exp(z - z.max()).sum()) + z.max()
        loss = (1 - e) * (lse - z[label]) + e * (lse - z).mean() + z_loss * lse**2
        losses.append(0.0 if label == ignore else loss)
    return np.array(losses)


def draw(*shape, seed=0, scale=3.0):
    values = scale * np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def test_formula():
    logits, labels = draw(6, 9), np.array([0, 8, 4, 2, 4, 1])
    options = dict(label_smoothing=0.3, z_loss=0.05, softcap=5.0, ignore_index=4)
    loss, lse = cross_entropy(logits, labels, return_lse=True, **options)
    np.testing.assert_allclose(
        loss, formula(logits, labels, 0.3, 0.05, 5.0, 4), rtol=2e-6
    )
    z = 5 * np.tanh(np.float64(logits) / 5)
    np.testing.assert_allclose(lse, np.log(np.exp(z).sum(-1)), rtol=1e-6)


def test_equals_torch():
    capped = dict(label_smoothing=0.1, z_loss=1e-2, softcap=30.0)
    for name, options in {
        "cross_entropy": {},
        "cross_entropy_smoothed": dict(label_smoothing=0.2),
        "cross_entropy_mean": dict(reduction="mean"),
        "cross_entropy_capped": capped,
    }.items():
        assert_equals_torch(name, lambda x: cross_entropy(x, LABELS, **options))  # noqa: B023


def test_equals_optax():
    logits, labels = draw(5, 7), jnp.array([3, 0, 5, 6, 2])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-6)


def test_gradient_is_softmax_minus_target():
    logits, labels = draw(4, 6), np.array([5, 0, 3, 3])
    dloss, dlse = (np.asarray(draw(4, seed=i)) for i in (1, 2))
    f = jax.vjp(
        lambda x: cross_entropy(x, labels, return_lse=True, z_loss=0.1), logits
    )[1]
    (dlogits,) = f((jnp.asarray(dloss), jnp.asarray(dlse)))
    x = np.float64(logits)
    lse = np.log(np.exp(x).sum(-1))
    slope = dloss * (1 + 0.2 * lse) + dlse
    expected = (
        slope[:, None] * np.exp(x - lse[:, None]) - dloss[:, None] * np.eye(6)[labels]
    )
    np.testing.assert_allclose(dlogits, expected, rtol=1e-5, atol=1e-5)


def loss_and_gradient(logits, labels, **options):
    f = jax.value_and_grad(
        lambda x: cross_entropy(x, jnp.array(labels), reduction="sum", **options)
    )
    return f(jnp.asarray(logits, jnp.float32))


@pytest.mark.parametrize("logit", [-np.inf, -3e38, 3e38])
def test_ignored_tokens_have_no_loss_and_no_gradient(logit):
    logits = [[1.0, 2.0, 3.0], [logit] * 3]
    loss, gradient = loss_and_gradient(logits, [0, -1], ignore_index=-1, z_loss=0.1)
    assert loss == loss_and_gradient(logits[:1], [0], z_loss=0.1)[0]
    np.testing.assert_array_equal(gradient[1], np.zeros(3))
    assert np.isfinite(gradient[0]).all()


def test_classes_of_probability_zero():
    inf = np.inf
    loss, gradient = loss_and_gradient([[1.0, -inf, 1.0]], [2])
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.5, 0.0, -0.5]], rtol=1e-6)
    loss, gradient = loss_and_gradient([[1.0, -inf, 1.0]], [1])
    assert loss == inf
    np.testing.assert_allclose(gradient, [[0.5, -1.0, 0.5]], rtol=1e-6)
    loss, gradient = loss_and_gradient([[-inf, -inf]], [0], z_loss=0.1)
    assert loss == inf
    np.testing.assert_array_equal(gradient, [[0.0, 0.0]])


def test_large_logits_do_not_overflow():
    loss, gradient = loss_and_gradient([[1e30, 0.0]], [1])
    np.testing.assert_allclose(loss, 1e30, rtol=1e-6)
    np.testing.assert_array_equal(gradient, [[1.0, -1.0]])


def test_a_wrong_label_is_loud():
    logits, labels = draw(4, 5), jnp.array([5, -1, 1, -100])
    loss, gradient = jax.value_and_grad(lambda x: jnp.nansum(cross_entropy(x, labels)))(
        logits
    )
    np.testing.assert_array_equal(
        np.isnan(cross_entropy(logits, labels)), [True, True, False, False]
    )
    assert np.isfinite(loss)
    np.testing.assert_array_equal(np.asarray(gradient)[[0, 1, 3]], np.zeros((3, 5)))


def test_reductions_count_what_is_not_ignored():
    logits = draw(5, 7)
    each = cross_entropy(logits, LABELS)
    total = cross_entropy(logits, LABELS, reduction="sum")
    np.testing.assert_allclose(total, each.sum(), rtol=1e-6)
    mean = cross_entropy(logits, LABELS, reduction="mean")
    np.testing.assert_allclose(mean, each.sum() / 4, rtol=1e-6)
    nothing = cross_entropy(logits, jnp.full(5, -100), reduction="mean")
    assert nothing == 0


def test_labels_of_every_integer_dtype():
    logits = draw(3, 300)
    expected = cross_entropy(logits, jnp.array([7, 0, 127]))
    for dtype in (jnp.int8, jnp.uint8, jnp.uint32):
        labels = jnp.array([7, 0, 127], dtype)
        np.testing.assert_array_equal(cross_entropy(logits, labels), expected)


def test_an_unsigned_label_does_not_wrap_to_the_one_that_is_ignored():
    """2**32 - 100 became -100 in int32. Drawn labels of all other tests are small."""
    labels = jnp.array([2**32 - 100, 1], jnp.uint32)
    loss = np.asarray(cross_entropy(jnp.ones((2, 4)), labels))
    assert np.isnan(loss[0]) and np.isclose(loss[1], np.log(4))


def test_half_precision_logits_give_a_float32_loss():
    logits, labels = draw(4, 50).astype(jnp.bfloat16), jnp.arange(4)
    loss = cross_entropy(logits, labels)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, formula(logits, np.arange(4)), rtol=1e-6)


def of_targets(logits, targets, w, e=0.0, z_loss=0.0, cap=None):
    """One token at a time, in float64, over all classes; as in PyTorch's manual."""
    losses = []
    for x, t in zip(np.float64(logits), np.float64(targets), strict=True):
        z = x if cap is None else cap * np.tanh(x / cap)
        lse = np.log(np.exp(z - z.max()).sum()) + z.max()
        t = (1 - e) * t + e / len(t)
        losses.append((w * t * (lse - z)).sum() + z_loss * lse**2)
    return np.array(losses)


def slopes(f, *operands, h=1e-5):
    """Central differences of a sum of losses in NumPy, in each operand."""
    found = []
    for i, x in enumerate(operands):
        d = np.zeros(x.shape)
        for at in np.ndindex(x.shape):
            moved = [np.array(y) for y in operands]
            moved[i][at] += h
            above = f(*moved)
            moved[i][at] -= 2 * h
            d[at] = (above - f(*moved)) / (2 * h)
        found.append(d)
    return found


WEIGHTED = [
    dict(),
    dict(label_smoothing=0.3),
    dict(z_loss=0.05, softcap=5.0),
    dict(label_smoothing=0.3, z_loss=0.05, softcap=5.0),
]


@pytest.mark.parametrize("options", WEIGHTED, ids=str)
def test_class_weights_are_pytorchs(options):
    """Each reduction by its own way through the primitives; a token is ignored."""
    rng = np.random.default_rng(4)
    logits, w = 3 * rng.standard_normal((5, 7)), rng.uniform(0.2, 3, 7)
    labels = np.array([3, 0, -100, 6, 2])
    kept = labels >= 0
    names = {"label_smoothing": "e", "z_loss": "z_loss", "softcap": "cap"}
    given = {names[n]: value for n, value in options.items()}

    def losses(logits, w):
        each = np.zeros(5)
        one_hot = np.eye(7)[labels[kept]]
        each[kept] = of_targets(logits[kept], one_hot, w, **given)
        return each

    def reduced(each, w):
        total, share = each.sum(), w[labels[kept]].sum()
        return {"none": each, "sum": total, "mean": total / share}

    def ours(logits, w, **more):
        return cross_entropy(
            logits, jnp.asarray(labels), class_weights=w, **options, **more
        )

    with jax.enable_x64(True):
        x, weights = jnp.asarray(logits), jnp.asarray(w)
        for reduction, value in reduced(losses(logits, w), w).items():
            loss, lse = ours(x, weights, reduction=reduction, return_lse=True)
            np.testing.assert_allclose(loss, value, rtol=1e-10)
            loss = ours(x, weights, reduction=reduction)
            np.testing.assert_allclose(loss, value, rtol=1e-10)
            assert lse.shape == (5,)
            grads = jax.grad(
                lambda x, w, r=reduction: ours(x, w, reduction=r).sum(), (0, 1)
            )(x, weights)
            expected = slopes(
                lambda x, w, r=reduction: reduced(losses(x, w), w)[r].sum(), logits, w
            )
            for g, e in zip(grads, expected, strict=True):
                np.testing.assert_allclose(g, e, rtol=1e-6, atol=1e-8)
        nothing = jnp.full(5, -100)
        assert cross_entropy(x, nothing, class_weights=weights, reduction="mean") == 0
        wrong = cross_entropy(x, jnp.full(5, 7), class_weights=weights, **options)
        assert np.isnan(wrong).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", WEIGHTED, ids=str)
def test_labels_may_be_probabilities(options, weighted):
    rng = np.random.default_rng(5)
    logits, targets = 3 * rng.standard_normal((4, 6)), rng.dirichlet(np.ones(6), 4)
    w = rng.uniform(0.2, 3, 6) if weighted else np.ones(6)
    names = {"label_smoothing": "e", "z_loss": "z_loss", "softcap": "cap"}
    given = {names[n]: value for n, value in options.items()}

    def ours(x, t, w, **more):
        w = w if weighted else None
        return cross_entropy(x, t, class_weights=w, **options, **more)

    with jax.enable_x64(True):
        operands = tuple(map(jnp.asarray, (logits, targets, w)))
        each = of_targets(logits, targets, w, **given)
        loss = ours(*operands, return_lse=True)[0]
        np.testing.assert_allclose(loss, each, rtol=1e-11)
        np.testing.assert_allclose(ours(*operands, reduction="sum"), each.sum())
        np.testing.assert_allclose(ours(*operands, reduction="mean"), each.mean())
        grads = jax.grad(lambda *a: ours(*a).sum(), (0, 1, 2))(*operands)
        expected = slopes(lambda *a: of_targets(*a, **given).sum(), logits, targets, w)
    for g, e in zip(grads[: 2 + weighted], expected, strict=False):
        np.testing.assert_allclose(g, e, rtol=1e-6, atol=1e-8)


def test_a_class_of_probability_zero_may_have_the_target_zero():
    logits = jnp.array([[0.0, -jnp.inf, 1.0], [0.0, -jnp.inf, 1.0], [-jnp.inf] * 3])
    targets = jnp.array([[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    loss, grad = jax.value_and_grad(lambda x: cross_entropy(x, targets)[0])(logits)
    p = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    np.testing.assert_allclose(loss, -np.log(p).mean(), rtol=1e-6)
    np.testing.assert_allclose(grad[0], [p[0] - 0.5, 0, p[1] - 0.5], atol=1e-6)
    np.testing.assert_array_equal(cross_entropy(logits, targets)[1:], [np.inf] * 2)
    all_grads = jax.grad(lambda x: cross_entropy(x, targets).sum())(logits)
    np.testing.assert_array_equal(all_grads[2], np.zeros(3))


def test_every_error_says_what_to_do():
    logits, labels = jnp.zeros((3, 4)), jnp.zeros(3, int)
    for options, match in (
        (dict(label_smoothing=1.5), r"`label_smoothing` must lie in \[0, 1\], got 1.5"),
        (dict(z_loss=-1.0), r"`z_loss` must be finite and not negative, got -1.0"),
        (dict(softcap=0.0), r"None means no cap"),
        (dict(reduction="avg"), r"must be 'none', 'sum' or 'mean', got 'avg'"),
    ):
        with pytest.raises(ValueError, match=match):
            cross_entropy(logits, labels, **options)
    with pytest.raises(TypeError, match=r"`labels` must have a dtype of kind Integer"):
        cross_entropy(logits, jnp.zeros(3))
    with pytest.raises(TypeError, match=r"`class_weights` must have .* \(4,\), got"):
        cross_entropy(logits, labels, class_weights=jnp.ones(3))


@pytest.mark.parametrize("bits", [32, 64])
def test_a_label_that_would_wrap_to_the_ignored_one_is_no_class(bits):
    """Tests of labels outside the classes had numbers that int32 holds."""
    with jax.enable_x64(bits == 64):
        x, w = jnp.ones((2, 4), jnp.float32), jnp.ones((5, 4), jnp.float32)
        labels = np.array([2**bits - 100, 1], f"uint{bits}")
        for loss in (
            cross_entropy(x @ w.T, labels),
            linear_cross_entropy(x, w, labels),
        ):
            assert np.isnan(loss[0]) and np.isfinite(loss[1])
