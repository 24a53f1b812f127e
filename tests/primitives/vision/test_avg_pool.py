"""avg_pool: PyTorch's values and gradients with and without padding in the count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import avg_pool
from jaxkern.testing.checks import bf16, case
from tests.golden.torch_losses_vision import assert_equals_torch
from tests.primitives.vision.images import OVERLAPPING, draw

CASES = [
    case(
        "overlapping",
        **OVERLAPPING,
        count_include_pad=False,
    ),
    case(
        "transition",
        full=True,
        x=bf16(2, 128, 56, 56),
        window=(2, 2),
        stride=(2, 2),
        padding=((0, 0), (0, 0)),
    ),
]


@pytest.mark.parametrize(
    "name, options",
    {
        "avg_pool2d": dict(window=(3, 2), stride=(2, 1), padding=(1, 1)),
        "avg_pool2d_exclude_pad": dict(
            window=3, stride=2, padding=1, count_include_pad=False
        ),
    }.items(),
)
def test_equals_torch(name, options):
    assert_equals_torch(name, functools.partial(avg_pool, **options))


def test_the_divisor():
    x = jnp.ones((1, 3, 3))
    options = dict(window=2, stride=2, padding=((1, 0), (1, 0)))
    np.testing.assert_array_equal(avg_pool(x, **options), [[[0.25, 0.5], [0.5, 1]]])
    y = avg_pool(x, **options, count_include_pad=False)
    np.testing.assert_array_equal(y, np.ones((1, 2, 2)))


def test_half_precision_sums_in_float32():
    x = jnp.full((1, 64, 64), 1.0078125, jnp.bfloat16)
    np.testing.assert_array_equal(avg_pool(x, 64), x[:, :1, :1])


def test_nhwc_is_the_same():
    x = draw(2, 3, 5, 6)
    y = avg_pool(x, 2, stride=(1, 2), padding=1)
    nhwc = avg_pool(jnp.moveaxis(x, 1, -1), 2, stride=(1, 2), padding=1, layout="NHWC")
    np.testing.assert_allclose(jnp.moveaxis(nhwc, -1, 1), y, rtol=1e-6)


def test_infinity_stays_in_its_windows():
    x = jnp.zeros((1, 4)).at[0, 0].set(jnp.inf)
    np.testing.assert_array_equal(avg_pool(x, (1, 2)), [[np.inf, 0.0]])
    dx = jax.grad(lambda x: avg_pool(x, (1, 2))[0, 1])(x)
    np.testing.assert_array_equal(dx, [[0, 0, 0.5, 0.5]])


def test_a_window_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match=r"avg_pool: a window over 3 x 3 pixels"):
        avg_pool(jnp.ones((2, 4)), 3)
