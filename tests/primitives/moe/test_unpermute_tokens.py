"""unpermute_tokens: the inverse and the transpose of permute_tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import permute_tokens, unpermute_tokens
from jaxkern.testing.checks import bf16, case, f32
from tests.primitives.moe.test_permute_tokens import permutation

CASES = [
    case("plain", rows=f32(12, 8), order=permutation(12), k=3),
    case("empty", rows=f32(0, 4), order=permutation(0), k=2),
    case("odd", rows=bf16(5, 3), order=permutation(5), k=1),
]


def test_undoes_the_permutation():
    x = jax.random.normal(jax.random.key(0), (5, 3))
    order = jnp.asarray(np.random.default_rng(0).permutation(10))
    slots = unpermute_tokens(permute_tokens(x, order, 2), order, 2)
    np.testing.assert_array_equal(slots, np.stack([x, x], axis=1))


def test_each_row_reaches_its_slot():
    rows, order = jnp.arange(6.0)[:, None], jnp.asarray([5, 0, 3, 1, 4, 2])
    slots = unpermute_tokens(rows, order, 3)
    expected = np.empty(6)
    expected[order] = np.arange(6)
    np.testing.assert_array_equal(slots[..., 0], expected.reshape(2, 3))


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match="5 rows are no whole tokens of 2 slots"):
        unpermute_tokens(jnp.ones((5, 4)), jnp.arange(5), 2)
    with pytest.raises(ValueError, match="unpermute_tokens: `k` must be at least 1"):
        unpermute_tokens(jnp.ones((2, 4)), jnp.arange(2), 0)
