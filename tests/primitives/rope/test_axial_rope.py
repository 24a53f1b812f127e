"""axial_rope and axial_rope_2d: repeated grids, tokens outside, batches, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import axial_rope, axial_rope_2d, axial_rope_cos_sin


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def test_d29_repeated_images_tile_the_grid():
    """SAM 2 has one image after another; tok // repeat would mix their rows."""
    x = draw(2, 12, 2, 8)
    y = axial_rope_2d(x, (2, 3))
    for image in (slice(0, 6), slice(6, 12)):
        np.testing.assert_allclose(
            y[:, image], axial_rope_2d(x[:, image], (2, 3)), atol=1e-6
        )
    block = axial_rope_2d(x, (2, 3), repeat="block")
    for k in range(2):
        np.testing.assert_allclose(
            block[:, k::2], axial_rope_2d(x[:, k::2], (2, 3)), atol=1e-6
        )
    assert np.abs(block - y).max() > 0.1


@pytest.mark.parametrize("repeat", ["tile", "block"])
def test_the_last_tokens_may_have_no_place(repeat):
    x = draw(2, 10, 2, 8)
    y = axial_rope_2d(x, (2, 2), repeat=repeat, num_exclude_rope=2)
    np.testing.assert_array_equal(y[:, 8:], x[:, 8:])
    np.testing.assert_allclose(
        y[:, :8], axial_rope_2d(x[:, :8], (2, 2), repeat=repeat), atol=1e-6
    )
    np.testing.assert_array_equal(axial_rope_2d(x, (2, 2), num_exclude_rope=10), x)


def test_grid_is_height_by_width():
    """The first half of a head turns by the column, the second by the row."""
    x = jnp.ones((1, 6, 1, 8))
    y = axial_rope_2d(x, (2, 3))
    columns, rows = y[0, :, 0, 0], y[0, :, 0, 4]
    angle = np.asarray([0, 1, 2, 0, 1, 2])
    np.testing.assert_allclose(columns, np.cos(angle) - np.sin(angle), atol=1e-6)
    angle = np.asarray([0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(rows, np.cos(angle) - np.sin(angle), atol=1e-6)


@pytest.mark.parametrize("pairing", ["interleaved", "neox", "neox_parts"])
def test_positions_may_be_shared_traced_or_of_each_image(pairing):
    x = draw(3, 4, 2, 12)
    positions = jnp.asarray([[0, 1, 2, 3], [5, 4, 4, 0], [1, 1, 2, 2]])  # three axes
    shared = axial_rope(x, positions, pairing=pairing)
    each = jnp.broadcast_to(positions[:, None], (3, 3, 4))
    f = jax.jit(lambda x, p: axial_rope(x, p, pairing=pairing))
    np.testing.assert_allclose(f(x, each), shared, atol=1e-6)
    one = jax.vmap(f, (0, 1))(x, each)
    np.testing.assert_allclose(one, shared, atol=1e-6)
    np.testing.assert_allclose(f(x[0], positions), shared[0], atol=1e-6)
    norms = (jnp.linalg.norm(a, axis=-1) for a in (shared, x))
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_half_precision_is_rounded_once():
    x = draw(1, 6, 2, 8).astype(jnp.bfloat16)
    y = axial_rope_2d(x, (2, 3))
    exact = axial_rope_2d(x.astype(jnp.float32), (2, 3))
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_no_tokens():
    assert axial_rope_2d(draw(2, 0, 2, 8), (2, 3)).shape == (2, 0, 2, 8)


def test_every_error_says_what_to_do():
    x, positions = draw(1, 6, 2, 8), jnp.zeros((2, 6), int)
    with pytest.raises(ValueError, match=r"pairing 'halves' is not"):
        axial_rope(x, positions, pairing="halves")
    with pytest.raises(TypeError, match=r"`positions` \[axes ... t\]"):
        axial_rope(x, positions[0])
    with pytest.raises(TypeError, match=r"dim `t` is 6 in `x` but 5 in `cos`"):
        axial_rope(x, positions[:, :5])
    with pytest.raises(ValueError, match=r"8 dims cannot be shared out .* to 3 axes"):
        axial_rope(x, jnp.zeros((3, 6), int))
    with pytest.raises(ValueError, match=r"sections \(3, 2\) are not 4 pairs on 2"):
        axial_rope_cos_sin(positions, 8, sections=(3, 2))
    with pytest.raises(TypeError, match=r"must have dims \[axes ... t\]"):
        axial_rope_cos_sin(jnp.zeros(2, int), 8)
    with pytest.raises(ValueError, match=r"6 tokens are no multiple of the 4 places"):
        axial_rope_2d(x, (2, 2))
    with pytest.raises(ValueError, match=r"repeat 'tok' is not"):
        axial_rope_2d(x, (2, 3), repeat="tok")
    with pytest.raises(TypeError, match=r"`x` must have dims \[... t n h\]"):
        axial_rope_2d(x[0, 0], (2, 3))
