"""max_pool: PyTorch's values and gradients, ties, NaN, infinities, layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import max_pool
from jaxkern.testing.checks import bf16, case
from tests.golden.torch_losses_vision import assert_equals_torch
from tests.primitives.vision.images import OVERLAPPING, draw

CASES = [
    case(
        "overlapping",
        **OVERLAPPING,
    ),
    case(
        "resnet_stem",
        full=True,
        x=bf16(2, 64, 112, 112),
        window=(3, 3),
        stride=(2, 2),
        padding=((1, 1), (1, 1)),
    ),
]


def test_equals_torch_where_pixels_are_equal_too():
    f = functools.partial(max_pool, window=(3, 2), stride=(2, 1), padding=(1, 0))
    assert_equals_torch("max_pool2d", f)


def test_equals_reduce_window():
    x = draw(2, 3, 8, 9)
    y = max_pool(x, (2, 4), stride=(3, 2), padding="SAME")
    expected = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 1, 2, 4), (1, 1, 3, 2), "SAME"
    )
    np.testing.assert_array_equal(y, expected)


def test_the_gradient_goes_to_the_first_maximum():
    x = jnp.array([[1.0, 5.0, 0.0], [5.0, 2.0, 5.0]])
    dx = jax.grad(lambda x: max_pool(x, (2, 3))[0, 0])(x)
    np.testing.assert_array_equal(dx, [[0, 1, 0], [0, 0, 0]])


def test_infinities_and_nan():
    x = jnp.array([[-jnp.inf, -jnp.inf, jnp.nan, 7.0]])
    y = max_pool(x, (1, 2), padding=((0, 0), (1, 1)))
    np.testing.assert_array_equal(y, [[-np.inf, np.nan, 7.0]])


def test_nhwc_is_the_same():
    x = draw(2, 3, 5, 6)
    y = max_pool(x, 2, stride=(1, 2), padding=1)
    nhwc = max_pool(jnp.moveaxis(x, 1, -1), 2, stride=(1, 2), padding=1, layout="NHWC")
    np.testing.assert_array_equal(jnp.moveaxis(nhwc, -1, 1), y)


def test_every_error_says_what_to_do():
    x = draw(1, 4, 4)
    with pytest.raises(ValueError, match=r"`padding` must be less than the window"):
        max_pool(x, 2, padding=2)
    with pytest.raises(
        ValueError, match=r"5 x 5 pixels does not fit an image of 4 x 4"
    ):
        max_pool(x, 5)
    with pytest.raises(ValueError, match=r"`window` must be one or two integers of at"):
        max_pool(x, (2, 0))
