"""conv2d: the formula, PyTorch's values and gradients, layouts, groups, sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import conv2d
from jaxkern.testing.checks import bf16, case, f32
from tests.golden.torch_losses_vision import assert_equals_torch
from tests.primitives.vision.images import check_nhwc

PLAIN = dict(
    stride=(2, 1), padding=((1, 0), (0, 2)), dilation=(1, 2), input_dilation=(1, 1)
)
CASES = [
    case("groups", x=f32(2, 4, 5, 4), weight=f32(6, 2, 3, 2), bias=f32(6), **PLAIN),
    case(
        "one_group",
        full=True,
        x=bf16(2, 3, 3, 4),
        weight=bf16(8, 3, 2, 1),
        stride=(1, 1),
        padding=((1, 1), (0, 0)),
        dilation=(1, 1),
        input_dilation=(2, 1),
    ),
    case(
        "vit_patches",
        full=True,
        x=bf16(4, 3, 224, 224),
        weight=bf16(768, 3, 16, 16),
        bias=bf16(768),
        stride=(16, 16),
        padding=((0, 0), (0, 0)),
        dilation=(1, 1),
        input_dilation=(1, 1),
    ),
]


def draw(*shape, seed=0, dtype=jnp.float32):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values, dtype)


def formula(x, weight, bias, stride, padding, dilation, groups):
    """One product at a time, in float64."""
    x, weight, bias = (np.asarray(a, np.float64) for a in (x, weight, bias))
    x = np.pad(x, ((0, 0), (0, 0), *padding))
    outs, ins, kh, kw = weight.shape
    h, w = (
        (x.shape[2 + i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    )
    y = np.zeros((x.shape[0], outs, h, w)) + bias[:, None, None]
    for o, c, i, j, p, q in np.ndindex(outs, ins, kh, kw, h, w):
        channel = o // (outs // groups) * ins + c
        row, column = stride[0] * p + dilation[0] * i, stride[1] * q + dilation[1] * j
        y[:, o, p, q] += x[:, channel, row, column] * weight[o, c, i, j]
    return y


def test_formula():
    x, weight, bias = draw(2, 4, 6, 5), draw(6, 2, 2, 3), draw(6)
    options = dict(stride=(1, 2), padding=((1, 2), (0, 3)), dilation=(3, 1), groups=2)
    np.testing.assert_allclose(
        conv2d(x, weight, bias, **options),
        formula(x, weight, bias, **options),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "name, options",
    {
        "conv2d": dict(stride=(2, 1), padding=(1, 0)),
        "conv2d_groups": dict(padding=2, dilation=(1, 2), groups=2),
        "conv2d_same": dict(padding="SAME"),
    }.items(),
)
def test_equals_torch(name, options):
    assert_equals_torch(name, functools.partial(conv2d, **options))


def test_nhwc_is_the_same_convolution():
    x, weight, bias = draw(2, 4, 6, 5), draw(6, 2, 2, 3), draw(6)
    options = dict(stride=2, padding=(1, 2), groups=2)
    check_nhwc(conv2d, x, weight, bias, **options)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_named_padding_is_that_of_lax(padding):
    x, weight = draw(1, 2, 7, 6), draw(3, 2, 3, 2)
    y = conv2d(x, weight, stride=(3, 2), padding=padding, dilation=(1, 2))
    expected = jax.lax.conv_general_dilated(
        x, weight, (3, 2), padding, rhs_dilation=(1, 2)
    )
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_half_precision_sums_in_float32_and_rounds_once():
    x, weight = draw(1, 64, 4, 4, dtype=jnp.bfloat16), draw(2, 64, 3, 3, seed=1)
    weight, bias = weight.astype(jnp.bfloat16), jnp.full(2, 100, jnp.bfloat16)
    exact, pull_exact = jax.vjp(
        conv2d, *(a.astype(jnp.float32) for a in (x, weight, bias))
    )
    y, pull = jax.vjp(conv2d, x, weight, bias)
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))
    dy = draw(*y.shape).astype(jnp.bfloat16)
    for g, e in zip(pull(dy), pull_exact(dy.astype(jnp.float32)), strict=True):
        assert g.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(g), e, rtol=2**-8, atol=1e-5)


def test_dtypes_promote():
    x, weight = draw(1, 2, 3, 3, dtype=jnp.bfloat16), draw(2, 2, 2, 2)
    y, pull = jax.vjp(conv2d, x, weight)
    assert y.dtype == jnp.float32
    assert [g.dtype for g in pull(y)] == [jnp.bfloat16, jnp.float32]


def test_every_error_says_what_to_do():
    x, weight = draw(1, 4, 3, 3), draw(6, 2, 2, 2)
    with pytest.raises(TypeError, match=r"the 2 channels that `weight` and groups=1"):
        conv2d(x, weight)
    with pytest.raises(ValueError, match=r"`groups` must divide the 5 channels"):
        conv2d(x, weight[:5], groups=2)
    with pytest.raises(
        ValueError, match=r"7 x 7 pixels does not fit an image of 5 x 5"
    ):
        conv2d(x, weight, groups=2, dilation=6, padding=1)
    with pytest.raises(ValueError, match=r"`stride` must be one or two integers of at"):
        conv2d(x, weight, groups=2, stride=0)
    with pytest.raises(ValueError, match=r"numbers, 'SAME' or 'VALID', got 'same'"):
        conv2d(x, weight, groups=2, padding="same")
    with pytest.raises(ValueError, match=r"`layout` must be 'NCHW' or 'NHWC'"):
        conv2d(x, weight, layout="CHWN")
    with pytest.raises(TypeError, match=r"dim `g\*o` is 6 in `weight` but 5 in `bias`"):
        conv2d(x, weight, draw(5), groups=2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("order", [1, 2])
def test_weight_gradient_of_groups_on_a_mesh_of_two_axes(kind, order):
    # on a mesh of one axis a sum over all devices is the sum over that axis
    x, weight = draw(4, 4, 5, 5), draw(8, 2, 3, 3, seed=1)

    def loss(weight, x):
        return jnp.sum(jnp.sin(conv2d(x, weight, groups=2)))

    def curvature(weight, x):
        return jnp.sum(jax.grad(loss)(weight, x) * jnp.cos(weight))

    gradient = jax.jit(jax.grad(loss if order == 1 else curvature))
    expected = gradient(weight, x)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(weight, NamedSharding(mesh, P()))
        actual = gradient(placed, jax.device_put(x, NamedSharding(mesh, P("a"))))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
