"""layer_norm_2d: the formula over the channels, in both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, layer_norm_2d
from tests.primitives.norm.test_layer_norm import formula, gradient

SHAPES = {  # NCHW
    "sam_neck": (1, 256, 8, 8),
    "odd": (2, 13, 3, 5),
    "one_channel": (2, 1, 3, 5),
    "one_pixel": (2, 16, 1, 1),
    "no_image": (0, 16, 4, 4),
    "no_pixel": (2, 16, 0, 4),
}


def to_layout(x, axis):
    return np.moveaxis(x, 1, axis)


@pytest.mark.parametrize("axis", [1, -1], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_match_the_formula(shape, axis):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, *shape))
    weight, bias = rng.normal(size=(2, shape[1]))
    y, vjp = jax.vjp(
        lambda *operands: layer_norm_2d(*operands, eps=0.1, axis=axis),
        *map(jnp.float32, (to_layout(x, axis), weight, bias)),
    )
    w, b = (v[:, None, None] for v in (weight, bias))
    expected = formula(x, w, b, 0.1, axis=1)
    np.testing.assert_allclose(y, to_layout(expected, axis), atol=4e-6)
    dx, dweight, dbias = vjp(jnp.float32(to_layout(dy, axis)))
    expected = gradient(x, dy * w, 0.1, axis=1)
    np.testing.assert_allclose(dx, to_layout(expected, axis), atol=4e-5)
    xhat = formula(x, eps=0.1, axis=1)
    np.testing.assert_allclose(dweight, (dy * xhat).sum((0, 2, 3)), atol=4e-5)
    np.testing.assert_allclose(dbias, dy.sum((0, 2, 3)), atol=4e-5)


def test_the_eps_of_sam_is_the_default():
    x = jnp.asarray([1.0, -1.0]).reshape(1, 2, 1, 1) * 1e-3  # variance 1e-6
    y = layer_norm_2d(x)
    np.testing.assert_allclose(y.ravel(), [0.5**0.5, -(0.5**0.5)], rtol=1e-5)


def test_it_is_one_layer_norm():
    rows = explain(layer_norm_2d, jnp.ones((1, 4, 2, 2)), jnp.ones(4)).rows
    assert [row.op for row in rows] == ["layer_norm"]


def test_a_weight_of_another_size_is_refused():
    with pytest.raises(TypeError, match="layer_norm: dim `d` is 4 in `x` but 2"):
        layer_norm_2d(jnp.ones((1, 4, 2, 2)), jnp.ones(2))
