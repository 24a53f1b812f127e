"""patchify, block_merge and their inverses: orders, layouts, transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import block_merge, block_unmerge, conv2d, patchify, unpatchify
from tests.golden.torch_losses_vision import assert_equals_torch

IMAGE = np.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)


def test_formula():
    patches = patchify(IMAGE, (2, 3))
    assert patches.shape == (2, 4, 18)
    for r, q, c, i, j in np.ndindex(2, 2, 3, 2, 3):
        np.testing.assert_array_equal(
            patches[:, r * 2 + q, (c * 2 + i) * 3 + j],
            IMAGE[:, c, r * 2 + i, q * 3 + j],
        )


def test_equals_torch():
    assert_equals_torch("unfold", lambda x: jnp.swapaxes(patchify(x, 2), 1, 2))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_product_with_patches_is_a_convolution(layout):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 6)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(5, 3, 2, 2)), jnp.float32)
    matrix = weight.reshape(5, -1).T
    if layout == "NHWC":
        x, weight = jnp.moveaxis(x, 1, -1), weight.transpose(2, 3, 1, 0)
        matrix = weight.reshape(-1, 5)
    y = conv2d(x, weight, stride=2, layout=layout)
    y = jnp.moveaxis(y, 1, -1) if layout == "NCHW" else y
    expected = patchify(x, 2, layout=layout) @ matrix
    np.testing.assert_allclose(y.reshape(2, 6, 5), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_unpatchify_is_inverse_and_transpose(layout):
    x = jnp.asarray(IMAGE, jnp.float32)
    height, width = (4, 6) if layout == "NCHW" else (3, 4)
    patch = (2, 3) if layout == "NCHW" else (3, 2)
    patches, pull = jax.vjp(lambda x: patchify(x, patch, layout=layout), x)
    back = unpatchify(patches, patch, height, width, layout=layout)
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(pull(patches)[0], x)


def test_block_merge_has_the_order_of_the_origin():
    ny, nx, c = 4, 6, 2
    x = np.arange(ny * nx * c).reshape(ny, nx, c)
    y = block_merge(x)
    for row, column in np.ndindex(ny, nx):
        block = (row // 2) * (nx // 2) + column // 2
        to = block * 4 + (row & 1) * 2 + (column & 1)
        np.testing.assert_array_equal(y[to], x[row, column])
    np.testing.assert_array_equal(block_unmerge(y, ny, nx), x)


@pytest.mark.parametrize("m", [1, 3])
def test_block_unmerge_is_the_inverse(m):
    x = np.arange(2 * 3 * 6 * 4).reshape(2, 3, 6, 4)
    np.testing.assert_array_equal(block_unmerge(block_merge(x, m), 3, 6, m), x)


def test_every_error_says_what_to_do():
    with pytest.raises(ValueError, match=r"must divide the 4 x 6 image, got 3 x 3"):
        patchify(IMAGE, 3)
    with pytest.raises(ValueError, match=r"has 6 patches of 2 x 2, got 5 with 12"):
        unpatchify(jnp.zeros((5, 12)), 2, 4, 6)
    with pytest.raises(ValueError, match=r"4 x 6 tokens in blocks of 2 x 2, got 20"):
        block_unmerge(jnp.zeros((20, 3)), 4, 6)
