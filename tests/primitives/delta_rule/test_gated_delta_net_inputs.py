"""gated_delta_net_inputs: the operators that it stands for, and its one gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import causal_conv1d, gated_delta_net_inputs, l2_norm
from jaxkern.testing.checks import bf16, case, f32, i32

SIZES: dict[str, Any] = dict(key_heads=1, key_dim=2, gate_columns=3)
CASES = [
    case("plain", x=f32(1, 5, 9), weight=f32(5, 3), **SIZES, eps=1e-6),
    case(
        "packed",
        x=f32(2, 4, 9),
        weight=f32(5, 2),
        segment_ids=i32(2, 4, high=2),
        **SIZES,
        eps=1e-6,
    ),
    case(
        "qwen3_next",
        full=True,
        x=bf16(1, 32, 1312),
        weight=bf16(768, 4),
        key_heads=2,
        key_dim=128,
        gate_columns=512,
        eps=1e-6,
    ),
]


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients_are_those_of_the_operators(packed):
    b, t, heads, h, values, gate, rest = 2, 7, 3, 4, 5, 6, 2
    c = 2 * heads * h + values
    x, weight = jnp.float32(draw(b, t, c + gate + rest)), jnp.float32(draw(c, 4))
    ids = jnp.array([[0, 0, 0, 1, 1, 2, 2], [5] * 7]) if packed else None

    def one_by_one(x, weight):
        part, z, others = jnp.split(x, (c, c + gate), axis=-1)
        y, _ = causal_conv1d(part, weight, segment_ids=ids, activation="silu")
        q, k, v = jnp.split(y, (heads * h, 2 * heads * h), axis=-1)
        q, k = (l2_norm(a.reshape(b, t, heads, h)) for a in (q, k))
        return q, k, v, z, others

    def together(x, weight):
        sizes = dict(key_heads=heads, key_dim=h, gate_columns=gate)
        return gated_delta_net_inputs(x, weight, segment_ids=ids, **sizes)

    expected, pull = jax.vjp(one_by_one, x, weight)
    found, own_pull = jax.vjp(together, x, weight)
    cotangents = tuple(jnp.float32(draw(*y.shape, seed=1)) for y in expected)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-6)
    for g, e in zip(own_pull(cotangents), pull(cotangents), strict=True):
        np.testing.assert_allclose(g, e, rtol=2e-5, atol=2e-5)


def test_refusals():
    x, weight = jnp.ones((1, 4, 9)), jnp.ones((5, 3))
    message = r"gated_delta_net_inputs: `x` has 9 columns and `weight` 5 rows"
    for name, wrong in (("key_heads", 2), ("gate_columns", 5), ("key_dim", 3)):
        sizes: dict[str, Any] = SIZES | {name: wrong}
        with pytest.raises(ValueError, match=message):
            gated_delta_net_inputs(x, weight, **sizes)
    with pytest.raises(
        ValueError, match="gated_delta_net_inputs: `weight` has no taps"
    ):
        gated_delta_net_inputs(x, weight[:, :0], **SIZES)
