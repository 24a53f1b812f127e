"""qk_norm_rope: head_norm_rope of both, with different heads, weights and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, head_norm_rope, qk_norm_rope, rope_cos_sin
from jaxkern.testing.checks import bf16, case, f32
from tests.primitives.rope.test_head_norm_rope import draw, norm, turned


def shapes(*lead, n, k, h, r, spec=f32):
    query, key = spec(*lead, n, h), spec(*lead, k, h)
    weights = dict(query_weight=spec(h), key_weight=spec(h))
    tables = dict(cos=f32(*lead, r), sin=f32(*lead, r), pair_offset=r)
    return dict(query=query, key=key) | weights | tables


CASES = [
    case("plain", **shapes(2, 2, n=4, k=2, h=8, r=3), offset=1.0),
    case(
        "no_weights",
        **shapes(3, n=2, k=1, h=4, r=2, spec=bf16)
        | {"query_weight": None, "key_weight": None},
        pairing="interleaved",
    ),
    case("qwen3_8b", full=True, **shapes(1, 8, n=32, k=8, h=128, r=64, spec=bf16)),
]


@pytest.mark.parametrize("at_end", [False, True])
def test_values_and_gradients_are_those_of_each(at_end):
    query, key = jnp.float32(draw(2, 3, 4, 8)), jnp.float32(draw(2, 3, 2, 8))
    weights = jnp.float32(draw(8)), jnp.float32(draw(8, seed=1))
    tables = jnp.float32(draw(2, 3, 3)), jnp.float32(draw(2, 3, 3, seed=1))
    cotangents = jnp.float32(draw(2, 3, 4, 8, seed=2)), jnp.float32(draw(2, 3, 2, 8))

    options = dict(eps=0.1, at_end=at_end)

    def each(query, key, query_weight, key_weight, cos, sin):
        return (
            head_norm_rope(query, query_weight, cos, sin, **options),
            head_norm_rope(key, key_weight, cos, sin, **options),
        )

    operands = query, key, *weights, *tables
    y, vjp = jax.vjp(lambda *a: qk_norm_rope(*a, **options), *operands)
    expected, expected_vjp = jax.vjp(each, *operands)
    for a, e in zip(y, expected, strict=True):
        np.testing.assert_array_equal(a, e)
    for a, e in zip(vjp(cotangents), expected_vjp(cotangents), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)


def test_one_position_of_a_decode_step():
    """Rows below num_q_heads take the query's weight, the others the key's."""
    heads, weights = draw(6, 8), draw(2, 8)
    tables = rope_cos_sin(jnp.asarray([7]), 6)
    query, key = jnp.float32(heads[None, :4]), jnp.float32(heads[None, 4:])
    y = jnp.concatenate(qk_norm_rope(query, key, *jnp.float32(weights), *tables), 1)
    angle = 7 * 10000.0 ** (-2 * np.arange(3) / 6)
    weight = weights[[0, 0, 0, 0, 1, 1]]
    expected = turned(
        norm(heads) * weight,
        np.cos(angle)[None],
        np.sin(angle)[None],
        [(0, 3), (1, 4), (2, 5)],
    )
    np.testing.assert_allclose(y[0], expected, atol=1e-5)


def test_it_is_one_op_forward_and_backward():
    query, key = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8), jnp.bfloat16)
    tables = rope_cos_sin(jnp.arange(3), 8)

    def loss(query, key):
        y_query, y_key = qk_norm_rope(query, key, None, None, *tables)
        assert y_query.dtype == jnp.float32 and y_key.dtype == jnp.bfloat16
        return y_query.sum() + y_key.sum().astype(jnp.float32)

    rows = explain(jax.grad(loss, (0, 1)), query, key).rows
    assert [row.op for row in rows] == ["qk_norm_rope_fwd", "qk_norm_rope_bwd"]


def test_every_error_says_what_to_do():
    query, key = jnp.zeros((1, 3, 4, 8)), jnp.zeros((1, 3, 2, 8))
    tables = rope_cos_sin(jnp.arange(3), 8)
    with pytest.raises(TypeError, match=r"qk_norm_rope: dim `h` is 8 in `query` but 6"):
        qk_norm_rope(query, key[..., :6], None, None, *tables)
    with pytest.raises(TypeError, match=r"`query` is 4, not a multiple of 3"):
        qk_norm_rope(query, jnp.zeros((1, 3, 3, 8)), None, None, *tables)
    with pytest.raises(ValueError, match=r"qk_norm_rope: 4 pairs at distance 5 do not"):
        qk_norm_rope(query, key, None, None, *tables, pair_offset=5)
