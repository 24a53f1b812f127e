"""qkv_split: order, shapes, and the concatenation as its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import qkv_split


def test_parts_are_where_they_lie():
    qkv = jnp.arange(3 * 22.0).reshape(3, 22)
    (query, key, value), vjp = jax.vjp(
        lambda x: qkv_split(x, (4, 2, 2), (3, 3, 2)), qkv
    )
    np.testing.assert_array_equal(query, qkv[:, :12].reshape(3, 4, 3))
    np.testing.assert_array_equal(key, qkv[:, 12:18].reshape(3, 2, 3))
    np.testing.assert_array_equal(value, qkv[:, 18:].reshape(3, 2, 2))
    np.testing.assert_array_equal(
        vjp((query, 2 * key, 3 * value))[0][:, 12:18], 2 * qkv[:, 12:18]
    )
    np.testing.assert_array_equal(vjp((query, key, value))[0], qkv)


def test_the_widths_must_add_up():
    with pytest.raises(
        TypeError, match=r"must be 12 \+ 6 \+ 4 = 22 .* got shape \(2, 21\)"
    ):
        qkv_split(jnp.ones((2, 21)), (4, 2, 2), (3, 3, 2))
