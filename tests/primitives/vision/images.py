"""Drawn images, and what holds of an operator in either layout."""

import jax.numpy as jnp
import numpy as np

from jaxkern.testing.checks import f32

OVERLAPPING = dict(
    x=f32(8, 2, 5, 4), window=(3, 2), stride=(2, 1), padding=((1, 0), (0, 1))
)


def draw(*shape, seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def check_nhwc(convolution, x, weight, bias, **options):
    """The same in the layout NHWC."""
    y = convolution(x, weight, bias, **options)
    nhwc = convolution(
        jnp.moveaxis(x, 1, -1),
        weight.transpose(2, 3, 1, 0),
        bias,
        layout="NHWC",
        **options,
    )
    np.testing.assert_allclose(jnp.moveaxis(nhwc, -1, 1), y, rtol=1e-6)
