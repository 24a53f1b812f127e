"""linear_cross_entropy: equals cross_entropy of the logits, in a block's memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkern import backend, cross_entropy, explain, linear_cross_entropy
from jaxkern.testing.checks import bf16, case, f32, i32
from tests.golden.torch_losses_vision import assert_equals_torch

EVERY = dict(label_smoothing=0.1, z_loss=0.01, softcap=3.0, ignore_index=2)
PLAIN = dict(label_smoothing=0.0, z_loss=0.0, softcap=None, ignore_index=None)
EACH = [
    case(
        "every_option",
        x=f32(8, 3),
        weight=f32(7, 3),
        labels=i32(8, high=7),
        bias=f32(7),
        block_size=3,
        **EVERY,
    ),
    case("plain", x=f32(4, 2), weight=f32(3, 2), labels=i32(4, high=3)),
    case(
        "bf16_one_block",
        full=True,
        x=bf16(2, 2, 4),
        weight=bf16(5, 4),
        labels=i32(2, 2, high=5),
    ),
    case(
        "llama3_vocabulary",
        full=True,
        x=bf16(16, 64),
        weight=bf16(128256, 64),
        labels=i32(16, high=128256),
    ),
]
CASES = {
    "linear_cross_entropy": EACH,
    "summed_linear_cross_entropy": [
        case(
            "every_option",
            x=f32(8, 3),
            weight=f32(7, 3),
            labels=i32(8, high=7),
            factor=f32(8),
            **EVERY,
        ),
        case(
            "bf16",
            full=True,
            x=bf16(2, 2, 4),
            weight=bf16(5, 4),
            labels=i32(2, 2, high=5),
            factor=bf16(2, 2),
            **PLAIN,
        ),
        case(
            "llama3_vocabulary",
            full=True,
            x=bf16(16, 64),
            weight=bf16(128256, 64),
            labels=i32(16, high=128256),
            factor=f32(16),
            **PLAIN,
        ),
    ],
}


def draw(*shape, seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


X, WEIGHT = draw(2, 5, 6), draw(11, 6)
LABELS = jnp.array([[3, 0, -100, 6, 2], [10, 9, 8, 4, 4]])


@pytest.mark.parametrize("block_size", [1, 4, 11, 100])
def test_equals_the_loss_of_the_logits(block_size):
    options = dict(label_smoothing=0.2, z_loss=0.1, softcap=2.0, return_lse=True)
    bias = draw(11)

    def of_logits(x, weight, bias):
        return cross_entropy(x @ weight.T + bias, LABELS, **options)

    def by_blocks(x, weight, bias):
        own = dict(options, block_size=block_size)
        return linear_cross_entropy(x, weight, LABELS, bias, **own)

    expected, expected_pull = jax.vjp(of_logits, X, WEIGHT, bias)
    actual, pull = jax.vjp(by_blocks, X, WEIGHT, bias)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    cotangents = draw(2, 5, seed=1), draw(2, 5, seed=2)
    for g, e in zip(pull(cotangents), expected_pull(cotangents), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5)


def test_equals_torch():
    def f(x, weight):
        return linear_cross_entropy(
            x,
            weight,
            jnp.array([3, 0, -100, 6, 2]),
            label_smoothing=0.1,
            z_loss=1e-2,
            softcap=30.0,
            block_size=3,
        )

    assert_equals_torch("linear_cross_entropy", f)


def test_reductions():
    each = linear_cross_entropy(X, WEIGHT, LABELS)
    mean = linear_cross_entropy(X, WEIGHT, LABELS, reduction="mean")
    np.testing.assert_allclose(mean, each.sum() / 9, rtol=1e-6)


def test_the_gradients_of_a_mean_are_those_of_its_tokens():
    def mean(x, weight):
        return linear_cross_entropy(x, weight, LABELS, reduction="mean")

    def of_tokens(x, weight):
        return jnp.sum(linear_cross_entropy(x, weight, LABELS)) / 9

    found, expected = (jax.grad(f, (0, 1))(X, WEIGHT) for f in (mean, of_tokens))
    for g, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "others, by_tokens",
    [
        (dict(reduction="sum"), True),
        (dict(), False),
        (dict(reduction="sum", block_size=3), False),
        (dict(reduction="sum", return_lse=True), False),
        (dict(reduction="sum", bias=draw(11)), False),
    ],
    ids=["sum", "none", "block_size", "return_lse", "bias"],
)
def test_which_calls_make_both_gradients_in_the_forward_pass(others, by_tokens):
    f = functools.partial(linear_cross_entropy, labels=LABELS, **others)
    text = str(jax.make_jaxpr(f)(X, WEIGHT))
    assert ("summed_linear_cross_entropy" in text) == by_tokens


@pytest.mark.parametrize("wrt", [0, 1, (0, 1)])
def test_the_logits_are_never_in_memory(wrt):
    tokens, v, d, block_size = 512, 8192, 8, 128
    operands = draw(tokens, d), draw(v, d), jnp.arange(tokens)

    def loss(x, weight, labels):
        return linear_cross_entropy(
            x, weight, labels, reduction="mean", block_size=block_size
        )

    compiled = jax.jit(jax.value_and_grad(loss, wrt)).lower(*operands).compile()
    whole = tokens * v * 4
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 8


def test_gradients_of_cut_tokens_on_an_explicit_mesh():
    x, labels = draw(8, 6), jnp.arange(8)
    mesh = jax.make_mesh(
        (4,), ("m",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )

    def grads(x, weight, labels):
        def loss(x, weight):
            return linear_cross_entropy(
                x, weight, labels, reduction="mean", block_size=4
            )

        return jax.jit(jax.grad(loss, (0, 1)))(x, weight)

    expected = grads(x, WEIGHT, labels)
    with jax.set_mesh(mesh):
        cut = [jax.device_put(a, P("m")) for a in (x, labels)]
        actual = grads(cut[0], jax.device_put(WEIGHT, P()), cut[1])
    for g, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)


def test_no_kernel_takes_a_bias_and_that_is_said():
    with backend("cpp"):
        found = explain(linear_cross_entropy, X, WEIGHT, LABELS, draw(11)).rows
    assert found[0].runs.startswith("xla")
    assert "`bias` is not in the kernel" in " ".join(found[0].refused)


def test_half_precision_sums_in_float32():
    x = jnp.ones((1, 4096), jnp.bfloat16)
    weight = jnp.stack([jnp.ones(4096), jnp.zeros(4096)]).astype(jnp.bfloat16)
    loss = linear_cross_entropy(x, weight, jnp.array([1]), block_size=1)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, [4096.0])


def test_every_error_says_what_to_do():
    with pytest.raises(ValueError, match=r"`block_size` must be at least 1, got 0"):
        linear_cross_entropy(X, WEIGHT, LABELS, block_size=0)
    with pytest.raises(ValueError, match=r"linear_cross_entropy: `z_loss` must be"):
        linear_cross_entropy(X, WEIGHT, LABELS, z_loss=np.inf)
    with pytest.raises(TypeError, match=r"dim `d` is 6 in `x` but 5 in `weight`"):
        linear_cross_entropy(X, WEIGHT[:, :5], LABELS)
