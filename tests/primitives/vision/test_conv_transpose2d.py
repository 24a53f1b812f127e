"""conv_transpose2d: PyTorch's values and gradients, and the transpose of conv2d."""

import functools

import jax
import numpy as np
import pytest

from jaxkern import conv2d, conv_transpose2d
from tests.golden.torch_losses_vision import assert_equals_torch
from tests.primitives.vision.images import check_nhwc, draw


@pytest.mark.parametrize(
    "name, options",
    {
        "conv_transpose2d": dict(stride=(2, 3), padding=(1, 0)),
        "conv_transpose2d_groups": dict(
            stride=2, padding=1, output_padding=(1, 0), groups=2, dilation=(2, 1)
        ),
    }.items(),
)
def test_equals_torch(name, options):
    assert_equals_torch(name, functools.partial(conv_transpose2d, **options))


def test_is_the_gradient_of_conv2d():
    x, weight = draw(2, 4, 7, 5), draw(6, 2, 3, 2)
    options = dict(stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    y, pull = jax.vjp(lambda x: conv2d(x, weight, **options), x)
    dy = draw(*y.shape, seed=1)
    np.testing.assert_allclose(
        conv_transpose2d(dy, weight, **options), pull(dy)[0], atol=1e-5
    )


def test_pads_that_reach_beyond_the_kernel_are_cut_off():
    x, weight = draw(1, 1, 4, 4), draw(1, 1, 1, 1)
    y = conv_transpose2d(x, weight, padding=1)
    np.testing.assert_allclose(y, x[..., 1:3, 1:3] * weight, rtol=1e-6)


def test_nhwc_is_the_same():
    x, weight, bias = draw(2, 4, 3, 5), draw(4, 3, 2, 3), draw(6)
    options = dict(stride=2, padding=(1, 0), groups=2)
    check_nhwc(conv_transpose2d, x, weight, bias, **options)


def test_every_error_says_what_to_do():
    x, weight = draw(1, 4, 3, 3), draw(4, 3, 2, 2)
    with pytest.raises(
        ValueError, match=r"must be less than stride or dilation, got 2"
    ):
        conv_transpose2d(x, weight, stride=2, output_padding=2)
    with pytest.raises(TypeError, match=r"the 5 channels that `weight`"):
        conv_transpose2d(x, draw(5, 3, 2, 2))
    with pytest.raises(ValueError, match=r"divide the 4 channels of `x`, got 3"):
        conv_transpose2d(x, weight, groups=3)
