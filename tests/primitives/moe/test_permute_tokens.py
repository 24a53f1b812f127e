"""permute_tokens: each row is its token's, and the gradient sums a token's rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import expert_order, permute_tokens
from jaxkern.testing.checks import Spec, bf16, case, f32


def permutation(r: int) -> Spec:
    return Spec((r,), np.int32, lambda rng, s: rng.permutation(s[0]))


CASES = [
    case("plain", x=f32(4, 8), order=permutation(12), k=3),
    case("empty", x=f32(0, 4), order=permutation(0), k=2),
    case("odd", x=bf16(5, 3), order=permutation(5), k=1),
    case("qwen3_30b", x=bf16(64, 2048), order=permutation(512), k=8, full=True),
]


def test_rows_are_those_of_their_tokens():
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    ids = np.asarray([[2, 0], [0, 1], [2, 1], [0, 2]])
    order, sizes = expert_order(jnp.asarray(ids), 3)
    rows = permute_tokens(jnp.asarray(x), order, 2)
    expected = [x[t] for e in range(3) for t in range(4) for i in ids[t] if i == e]
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(sizes, [3, 2, 3])


def test_the_gradient_sums_the_slots_of_a_token():
    order = jnp.asarray([5, 0, 3, 1, 4, 2])
    weights = np.arange(6.0)[:, None]  # d(loss) / d(rows[i])

    def loss(x):
        return (permute_tokens(x, order, 2) * weights).sum()

    expected = np.zeros((3, 1))
    for i, slot in enumerate(order.tolist()):
        expected[slot // 2] += i
    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones((3, 1))), expected)


def test_the_gradient_has_no_scatter():
    order = jnp.arange(8)[::-1]
    f = jax.grad(lambda x: permute_tokens(x, order, 2).sum())
    assert "scatter" not in jax.jit(f).lower(jnp.ones((4, 3))).as_text()


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match="a place for each of 3 slots of 2 tokens"):
        permute_tokens(jnp.ones((2, 4)), jnp.arange(4), 3)
    with pytest.raises(ValueError, match="permute_tokens: `k` must be at least 1"):
        permute_tokens(jnp.ones((2, 4)), jnp.arange(0), 0)
