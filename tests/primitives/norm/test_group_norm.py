"""group_norm: formula and gradient in both layouts, images far from zero, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import group_norm
from jaxkern.testing.checks import bf16, case, f16, f32

CHANNELS_FIRST = [  # x[b, group, channel, pixel]
    case(
        "stable_diffusion_unet",
        x=bf16(2, 32, 10, 64),
        weight=bf16(32, 10),
        bias=bf16(32, 10),
    ),
    case(
        "stable_diffusion_vae",
        full=True,
        x=bf16(1, 32, 4, 4096),
        weight=bf16(32, 4),
        bias=bf16(32, 4),
        eps=1e-6,
    ),
    case("even", x=f32(2, 8, 2, 4), weight=f32(8, 2), bias=f32(8, 2)),
    case("odd", x=f32(3, 5, 3, 7), weight=f32(5, 3), bias=None, eps=0.1),
    case("bare", x=f32(2, 3, 2, 5)),
    case("instance_norm", x=f16(2, 7, 1, 15), weight=f16(7, 1), bias=f16(7, 1)),
    case("one_image", x=f32(3, 2, 5), bias=f32(3, 2)),
    case("empty_batch", x=f32(0, 2, 3, 4), weight=f32(2, 3)),
    case("empty_image", x=f32(2, 2, 3, 0), weight=f32(2, 3), bias=f32(2, 3)),
]
CASES = {
    "group_norm": CHANNELS_FIRST,
    "channels_last_group_norm": [  # x[b, pixel, group, channel]
        case("even", x=f32(2, 4, 8, 2), weight=f32(8, 2), bias=f32(8, 2), eps=1e-5),
        case("odd", x=bf16(3, 7, 5, 3), weight=f32(5, 3), eps=0.1),
    ],
}


def formula(x, weight, bias, groups, eps=1e-5):
    """Of NCHW images, one group at a time."""
    y = np.empty_like(x)
    width = x.shape[1] // groups
    for n in range(x.shape[0]):
        for c in range(0, x.shape[1], width):
            part = x[n, c : c + width]
            y[n, c : c + width] = (part - part.mean()) / np.sqrt(part.var() + eps)
    return y * weight[:, None, None] + bias[:, None, None]


def gradient(x, dy, groups, eps=1e-5):
    """Of y without weight and bias, in x."""
    shape = (x.shape[0], groups, -1)
    centred = x.reshape(shape) - x.reshape(shape).mean(-1, keepdims=True)
    std = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    d = dy.reshape(shape)
    dx = d / std - centred * (d * centred).mean(-1, keepdims=True) / std**3
    return (dx - dx.mean(-1, keepdims=True)).reshape(x.shape)


def to_layout(x, axis):
    return np.moveaxis(x, 1, axis)


@pytest.mark.parametrize("axis", [1, -1], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_values_and_gradients_match_the_formula(groups, axis):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 2, 6, 3, 5)) + 1
    weight, bias = rng.normal(size=(2, 6))
    y, vjp = jax.vjp(
        lambda *operands: group_norm(*operands, groups=groups, eps=0.1, axis=axis),
        *map(jnp.float32, (to_layout(x, axis), weight, bias)),
    )
    expected = formula(x, weight, bias, groups, 0.1)
    np.testing.assert_allclose(y, to_layout(expected, axis), atol=4e-6)
    dx, dweight, dbias = vjp(jnp.float32(to_layout(dy, axis)))
    expected = gradient(x, dy * weight[:, None, None], groups, 0.1)
    np.testing.assert_allclose(dx, to_layout(expected, axis), atol=1e-5)
    xhat = formula(x, np.ones(6), np.zeros(6), groups, 0.1)
    np.testing.assert_allclose(dweight, (dy * xhat).sum((0, 2, 3)), atol=4e-5)
    np.testing.assert_allclose(dbias, dy.sum((0, 2, 3)), atol=4e-5)


@pytest.mark.parametrize("pixels", [(), (7,), (2, 3, 4)])
def test_any_number_of_pixel_dims(pixels):
    x = np.random.default_rng(0).normal(size=(2, 6, *pixels))
    flat = x.reshape(2, 6, -1, 1)
    expected = formula(flat, np.ones(6), np.zeros(6), 3).reshape(x.shape)
    np.testing.assert_allclose(group_norm(jnp.float32(x), groups=3), expected, 1e-5)


def test_images_far_from_zero_keep_their_digits():
    x = np.float32(np.random.default_rng(0).normal(size=(2, 4, 64, 64)) + 1e4)
    expected = formula(np.float64(x), np.ones(4), np.zeros(4), 2)
    y = group_norm(jnp.asarray(x), groups=2)
    np.testing.assert_allclose(y, expected, atol=np.spacing(np.float32(1e4)))


def test_a_constant_image_gives_the_bias():
    x, bias = jnp.full((1, 4, 7, 9), 1e4 / 3), jnp.arange(4.0)
    y = group_norm(x, jnp.ones(4), bias, groups=2)
    np.testing.assert_array_equal(y, jnp.broadcast_to(bias[:, None, None], x.shape))


def test_eps_is_added_to_the_biased_variance():
    x = jnp.asarray([1.0, 5.0]).reshape(1, 2, 1, 1)  # variance 4
    y = group_norm(x, groups=1, eps=5.0)
    np.testing.assert_allclose(y.ravel(), [-2 / 3, 2 / 3], rtol=1e-6)


def test_large_half_precision_values_do_not_overflow():
    x = jnp.asarray([6e4, -6e4] * 4, jnp.float16).reshape(1, 2, 2, 2)
    np.testing.assert_array_equal(group_norm(x, groups=2).ravel(), [1, -1] * 4)


def test_errors_say_what_to_do():
    x = jnp.ones((1, 6, 2, 2))
    for groups in (0, 4):
        with pytest.raises(ValueError, match="group_norm: `groups` must divide the 6"):
            group_norm(x, groups=groups)
    with pytest.raises(TypeError, match=r"`weight` must have shape \(6,\), got \(2,\)"):
        group_norm(x, jnp.ones(2), groups=2)
    with pytest.raises(TypeError, match="group_norm: `x` must have a dtype of kind"):
        group_norm(x.astype(int), groups=2)
