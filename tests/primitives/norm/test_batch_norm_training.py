"""batch_norm_training: formula, running statistics, gradients, far from zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import batch_norm, batch_norm_training
from jaxkern.testing.checks import bf16, case, f16, f32
from tests.primitives.norm.test_batch_norm import (
    ALL_BUT_THE_CHANNEL,
    formula,
    to_layout,
)

CASES = [  # x[batch, channel, pixel]
    case("resnet50_stage4", x=bf16(2, 256, 49), weight=f32(256), bias=f32(256)),
    case("even", x=f32(2, 8, 16), weight=f32(8), bias=f32(8)),
    case("odd", x=f32(3, 5, 7), weight=f32(5), eps=0.1),
    case("bare", x=f16(3, 3, 5)),
    case("vectors", x=f32(8, 4, 1), weight=f32(4), bias=f32(4)),
    case("one_value", x=f32(1, 4, 1), weight=f32(4), bias=f32(4), eps=0.1),
    case("empty_batch", x=f32(0, 4, 9), weight=f32(4)),
    case("empty_image", x=f32(2, 4, 0), bias=f32(4)),
]


def statistics(x):
    return x.mean(ALL_BUT_THE_CHANNEL), x.var(ALL_BUT_THE_CHANNEL)


@pytest.mark.parametrize("axis", [1, -1], ids=["nchw", "nhwc"])
def test_values_and_running_statistics_match_the_formula(axis):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 6, 4, 5)) + 1
    weight, bias, running_mean, running_variance = rng.normal(size=(4, 6))
    y, new_mean, new_variance = batch_norm_training(
        *map(
            jnp.float32,
            (to_layout(x, axis), running_mean, running_variance, weight, bias),
        ),
        momentum=0.3,
        eps=0.1,
        axis=axis,
    )
    mean, variance = statistics(x)
    expected = formula(x, mean, variance, weight, bias, 0.1)
    np.testing.assert_allclose(y, to_layout(expected, axis), atol=4e-6)
    np.testing.assert_allclose(new_mean, 0.7 * running_mean + 0.3 * mean, atol=1e-6)
    unbiased = x.var(ALL_BUT_THE_CHANNEL, ddof=1)
    expected = 0.7 * running_variance + 0.3 * unbiased
    np.testing.assert_allclose(new_variance, expected, atol=1e-6)


def test_gradients_match_the_formula():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 3, 6, 4, 5)) + 1
    weight, bias, dmean, dvariance = rng.normal(size=(4, 6))
    _, vjp = jax.vjp(
        lambda x, weight, bias: batch_norm_training(
            x, jnp.zeros(6), jnp.zeros(6), weight, bias, momentum=0.3, eps=0.1
        ),
        *map(jnp.float32, (x, weight, bias)),
    )
    dx, dweight, dbias = vjp(tuple(map(jnp.float32, (dy, dmean, dvariance))))

    mean, variance = (v[:, None, None] for v in statistics(x))
    n, std = 3 * 4 * 5, np.sqrt(variance + 0.1)
    xhat, d = (x - mean) / std, dy * weight[:, None, None]

    def average(v):
        return v.mean(ALL_BUT_THE_CHANNEL, keepdims=True)

    expected = (d - average(d) - xhat * average(d * xhat)) / std
    expected += 0.3 * dmean[:, None, None] / n
    expected += 0.3 * dvariance[:, None, None] * 2 * (x - mean) / (n - 1)
    np.testing.assert_allclose(dx, expected, atol=1e-5)
    np.testing.assert_allclose(dweight, (dy * xhat).sum(ALL_BUT_THE_CHANNEL), 1e-4)
    np.testing.assert_allclose(dbias, dy.sum(ALL_BUT_THE_CHANNEL), 1e-5)


def test_after_many_steps_on_one_batch_inference_agrees():
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 3, 40, 40)))
    mean, variance = jnp.zeros(3), jnp.ones(3)
    for _ in range(20):
        y, mean, variance = batch_norm_training(x, mean, variance, momentum=0.7)
    # they differ by the unbiased variance, n / (n - 1) with n = 6400
    np.testing.assert_allclose(y, batch_norm(x, mean, variance), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("offset", [1e4, -1e6])
def test_channels_far_from_zero_keep_their_digits(offset):
    x = np.float32(np.random.default_rng(0).normal(size=(8, 2, 32, 32)) + offset)
    mean, variance = statistics(np.float64(x))
    y, new_mean, new_variance = batch_norm_training(
        jnp.asarray(x), jnp.zeros(2), jnp.zeros(2), momentum=1.0, eps=0.0
    )
    spacing = np.spacing(np.float32(abs(offset)))
    expected = formula(np.float64(x), mean, variance, np.ones(2), np.zeros(2), 0.0)
    np.testing.assert_allclose(y, expected, atol=spacing)
    np.testing.assert_allclose(new_mean, mean, rtol=1e-7)
    n = 8 * 32 * 32
    np.testing.assert_allclose(new_variance, variance * n / (n - 1), rtol=0.01)


def test_a_constant_channel_gives_the_bias_and_variance_zero():
    x = jnp.full((3, 2, 5, 7), 1e4 / 3)
    y, mean, variance = batch_norm_training(
        x, jnp.zeros(2), jnp.ones(2), jnp.ones(2), jnp.asarray([1.0, 2.0]), momentum=1.0
    )
    np.testing.assert_array_equal(y[:, 0], np.ones((3, 5, 7)))
    np.testing.assert_array_equal(y[:, 1], np.full((3, 5, 7), 2))
    np.testing.assert_allclose(mean, x[0, :, 0, 0])
    np.testing.assert_array_equal(variance, [0, 0])


def test_one_value_has_variance_zero_and_no_value_changes_nothing():
    running = jnp.asarray([3.0, 4.0]), jnp.asarray([1.0, 2.0])
    y, mean, variance = batch_norm_training(jnp.ones((1, 2)), *running, momentum=0.5)
    np.testing.assert_array_equal(y, [[0, 0]])
    np.testing.assert_allclose(mean, [2, 2.5])
    np.testing.assert_allclose(variance, [0.5, 1])
    y, *unchanged = batch_norm_training(jnp.ones((0, 2, 3)), *running)
    assert y.shape == (0, 2, 3)
    np.testing.assert_array_equal(unchanged, running)


def test_large_half_precision_values_do_not_overflow():
    x = jnp.asarray([[6e4], [-6e4]], jnp.float16)
    y, _, variance = batch_norm_training(x, jnp.zeros(1), jnp.zeros(1), momentum=1.0)
    np.testing.assert_array_equal(y, [[1], [-1]])
    np.testing.assert_allclose(variance, [7.2e9], rtol=1e-6)


def test_running_statistics_keep_their_dtype():
    running = jnp.zeros(2, jnp.bfloat16), jnp.ones(2, jnp.float32)
    _, mean, variance = batch_norm_training(jnp.ones((3, 2), jnp.float16), *running)
    assert (mean.dtype, variance.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_running_statistic_of_another_size_is_refused():
    x, v = jnp.ones((2, 4, 3)), jnp.ones(4)
    with pytest.raises(TypeError, match=r"`running_mean` must have shape \(4,\)"):
        batch_norm_training(x, jnp.ones(1), v)
    with pytest.raises(TypeError, match=r"`running_variance` must have shape \(4,\)"):
        batch_norm_training(x, v, jnp.ones(3))
