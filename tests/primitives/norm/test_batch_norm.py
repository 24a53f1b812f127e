"""batch_norm: formula and gradients in both layouts, eps, large values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import batch_norm
from jaxkern.testing.checks import bf16, case, f16, f32, uniform

CASES = [  # x[b, channel, pixel]
    case(
        "resnet50_stage4",
        x=bf16(2, 256, 49),
        mean=f32(256),
        variance=uniform(256, low=0.5, high=2.0),
        weight=f32(256),
        bias=f32(256),
    ),
    case(
        "even",
        x=f32(2, 8, 16),
        mean=f32(8),
        variance=uniform(8, low=0.5, high=2.0),
        weight=f32(8),
        bias=f32(8),
    ),
    case(
        "odd",
        x=f32(3, 5, 7),
        mean=f32(5),
        variance=uniform(5, low=0.5, high=2.0),
        weight=f32(5),
        eps=0.1,
    ),
    case("bare", x=f16(3, 2, 5), mean=f32(2), variance=uniform(2, low=0.5, high=2.0)),
    case("one_pixel", x=f32(4, 1), mean=f32(4), variance=uniform(4, low=0.5)),
    case("empty", x=f32(0, 4, 9), mean=f32(4), variance=uniform(4), bias=f32(4)),
]
ALL_BUT_THE_CHANNEL = (0, 2, 3)


def formula(x, mean, variance, weight, bias, eps):
    """Of NCHW images."""
    mean, variance, weight, bias = (
        v[:, None, None] for v in (mean, variance, weight, bias)
    )
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


def to_layout(x, axis):
    return np.moveaxis(x, 1, axis)


@pytest.mark.parametrize("axis", [1, -1], ids=["nchw", "nhwc"])
def test_values_and_gradients_match_the_formula(axis):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 3, 6, 4, 5)) + 1
    mean, weight, bias = rng.normal(size=(3, 6))
    variance = rng.uniform(0.5, 2, 6)
    y, vjp = jax.vjp(
        lambda *operands: batch_norm(*operands, eps=0.1, axis=axis),
        *map(jnp.float32, (to_layout(x, axis), mean, variance, weight, bias)),
    )
    expected = formula(x, mean, variance, weight, bias, 0.1)
    np.testing.assert_allclose(y, to_layout(expected, axis), atol=4e-6)
    dx, *of_channels = vjp(jnp.float32(to_layout(dy, axis)))
    std = np.sqrt(variance + 0.1)
    expected = dy * (weight / std)[:, None, None]
    np.testing.assert_allclose(dx, to_layout(expected, axis), atol=4e-6)
    total = dy.sum(ALL_BUT_THE_CHANNEL)
    along_x = (dy * (x - mean[:, None, None])).sum(ALL_BUT_THE_CHANNEL)
    expected = (
        -weight / std * total,
        -0.5 * weight / std**3 * along_x,
        along_x / std,
        total,
    )
    for g, e in zip(of_channels, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=2e-5)


def test_eps_is_added_to_the_variance():
    x = jnp.asarray([[7.0]])
    y = batch_norm(x, jnp.ones(1), jnp.asarray([4.0]), eps=5.0)
    np.testing.assert_allclose(y, [[2.0]], rtol=1e-6)


def test_values_far_from_zero_keep_their_digits():
    x = jnp.asarray([[1e6 + 0.5]])  # weight * x - weight * mean would lose the half
    y = batch_norm(x, jnp.asarray([1e6]), jnp.ones(1), jnp.asarray([3.0]), eps=0.0)
    np.testing.assert_allclose(y, [[1.5]], rtol=1e-6)


def test_large_half_precision_values_do_not_overflow():
    x = jnp.asarray([[6e4, -6e4]], jnp.float16)
    mean, variance = jnp.asarray([-6e4, 6e4]), jnp.full(2, 3.6e9)
    np.testing.assert_array_equal(batch_norm(x, mean, variance), [[2, -2]])


def test_an_operand_of_another_size_is_refused():
    x, v = jnp.ones((2, 4, 3, 3)), jnp.ones(4)
    with pytest.raises(TypeError, match="batch_norm: dim `channel` is 4 in `x` but 3"):
        batch_norm(x, v, jnp.ones(3))
    with pytest.raises(TypeError, match="batch_norm: dim `channel` is 3 in `x` but 4"):
        batch_norm(x, v, v, axis=-1)
