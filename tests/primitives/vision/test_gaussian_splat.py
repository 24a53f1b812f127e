"""gaussian_splat: pixel by pixel in NumPy, the limits of alpha, long stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import gaussian_splat
from jaxkern.testing.checks import Spec, bf16, case, f32, uniform


def positive_definite(rng, shape):
    a, c = rng.uniform(0.05, 0.3, (2, shape[0]))
    return np.stack([a, rng.uniform(-0.9, 0.9, shape[0]) * np.sqrt(a * c), c], -1)


def scene(n, channels, spec=f32):
    return dict(
        means=uniform(n, 2, high=4.0),
        conics=Spec((n, 3), np.float32, positive_definite),
        colors=spec(n, channels),
        opacities=uniform(n, low=0.3, high=0.9),
    )


CASES = [
    case("small", full=True, **scene(2, 1), height=1, width=2),
    case("plain", full=True, **scene(2, 3), background=f32(3), height=2, width=3),
    case("one_channel", full=True, **scene(5, 1), height=3, width=1),
    case("empty", full=True, **scene(0, 3), background=f32(3), height=3, width=3),
    case("half", full=True, **scene(7, 3, bf16), height=5, width=3),
    case("even", full=True, **scene(8, 4), background=f32(4), height=2, width=2),
    case("many", full=True, **scene(300, 3), height=32, width=32, ulps=64.0),
]


def formula(means, conics, colors, opacities, background, height, width):
    """(image, transmittance), one pixel and Gaussian at a time in float64."""
    image = np.zeros((height, width, colors.shape[1]))
    left = np.ones((height, width))
    for row, column in np.ndindex(height, width):
        for mean, (a, b, c), color, opacity in zip(
            means, conics, colors, opacities, strict=True
        ):
            offset = np.array([column + 0.5, row + 0.5]) - mean
            power = -0.5 * offset @ np.array([[a, b], [b, c]]) @ offset
            alpha = min(0.99, opacity * np.exp(power))
            if alpha < 1 / 255:
                continue
            after = left[row, column] * (1 - alpha)
            if after < 1e-4:
                break
            image[row, column] += left[row, column] * alpha * color
            left[row, column] = after
    return image + left[..., None] * background, left


def draw(n, seed=0, high=4.0):
    rng = np.random.default_rng(seed)
    conics = positive_definite(rng, (n, 3))
    means, opacities = rng.uniform(0, high, (n, 2)), rng.uniform(0.2, 1.0, n)
    return means, conics, rng.standard_normal((n, 3)), opacities


def test_the_formula_in_float64():
    # 40 wide Gaussians finish most pixels, and far ones fall below 1 / 255
    operands = draw(40, high=12.0)
    background = np.array([1.0, -2.0, 0.5])
    expected, left = formula(*operands, background, 5, 6)
    assert left.min() < 1e-3 and left.max() > 0.01
    with jax.enable_x64(True):
        actual = gaussian_splat(
            *map(jnp.asarray, operands), None, background, height=5, width=6
        )
    np.testing.assert_allclose(actual[0], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(actual[1], left, rtol=1e-12)


@pytest.mark.full
def test_depths_sort_and_the_order_given_breaks_ties():
    means, conics, colors, opacities = (x.astype(np.float32) for x in draw(6))
    depths = np.array([3, 1, 2, 1, 0, 2], np.float32)
    order = [4, 1, 3, 2, 5, 0]
    sizes = dict(height=4, width=4)
    operands = (means, conics, colors, opacities)
    sorted_by_depth = gaussian_splat(*operands, depths, **sizes)
    given_sorted = gaussian_splat(*(x[order] for x in operands), **sizes)
    np.testing.assert_array_equal(sorted_by_depth[0], given_sorted[0])
    assert abs(gaussian_splat(*operands, **sizes)[0] - given_sorted[0]).max() > 1e-3

    def loss(colors, depths):
        out = gaussian_splat(means, conics, colors, opacities, depths, **sizes)
        return out[0].sum()

    dcolors, ddepths = jax.grad(loss, (0, 1))(colors, depths)
    dsorted = jax.grad(
        lambda c: gaussian_splat(*(x[order] for x in operands[:2]), c,
                                 opacities[order], **sizes)[0].sum()
    )(colors[order])  # fmt: skip
    np.testing.assert_allclose(dcolors[np.array(order)], dsorted, rtol=1e-6)
    assert not np.any(ddepths)


@pytest.mark.full
def test_gradients_survive_a_stack_that_lets_nothing_through():
    # 400 Gaussians on one pixel: a running product would have underflowed
    n = 400
    operands = [
        np.tile(x, (n, *(1,) * (x.ndim - 1))).astype(np.float32) for x in draw(1)
    ]
    operands[3][:] = np.linspace(0.05, 0.99, n)[::-1]

    def loss(*operands):
        image, left = gaussian_splat(*operands, height=4, width=4)
        return jnp.sum(jnp.sin(image)) + jnp.sum(left)

    with jax.enable_x64(True):
        exact = jax.grad(loss, range(4))(*(jnp.asarray(x, float) for x in operands))
        exact = [np.asarray(d) for d in exact]
    grads = jax.grad(loss, range(4))(*operands)
    for d, e in zip(grads, exact, strict=True):
        assert np.isfinite(d).all()
        np.testing.assert_allclose(d, e, rtol=1e-3, atol=1e-4 * abs(e).max())


@pytest.mark.full
def test_alpha_is_cut_off_at_0_99_and_has_no_gradient_there():
    means, conics = jnp.full((1, 2), 0.5), jnp.asarray([[1.0, 0.0, 1.0]])
    one = jnp.ones(1)

    def pixel(opacity, at=means):
        return gaussian_splat(at, conics, one[:, None], opacity, height=1, width=1)[0][
            0, 0, 0
        ]

    np.testing.assert_allclose(pixel(one), 0.99)
    assert jax.grad(pixel)(one) == 0 and jax.grad(pixel)(one / 2) == 1
    assert pixel(one, means + 3.5) == 0  # exp(-12.25) < 1 / 255


def test_errors_name_the_operand():
    means, conics, colors, opacities = (x.astype(np.float32) for x in draw(3))
    sizes = dict(height=2, width=2)
    with pytest.raises(TypeError, match="gaussian_splat: dim `gaussian` is 3 in"):
        gaussian_splat(means, conics[:2], colors, opacities, **sizes)
    with pytest.raises(TypeError, match=r"`depths` must have shape \(3,\)"):
        gaussian_splat(means, conics, colors, opacities, opacities[:2], **sizes)
    with pytest.raises(ValueError, match="`height` and `width` must be at least 1"):
        gaussian_splat(means, conics, colors, opacities, height=0, width=2)
