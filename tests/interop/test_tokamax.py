"""Against formulas in float64, and the signatures of tokamax 0.0.12."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.interop import tokamax
from tests.interop.signatures import signature_of

RNG = np.random.default_rng(0)
SIGNATURES = {
    "dot_product_attention": "query key value bias=None mask=None * scale=None "
    "is_causal=False query_seq_lengths=None key_value_seq_lengths=None "
    "local_window_size=None logits_soft_cap=None precision=None implementation=None "
    "q_sharding=None",
    "layer_norm": "x scale offset * axis=-1 epsilon=1e-06 scale_offset=0.0 "
    "subtract_mean=True implementation=None",
    "gated_linear_unit": "x weights * activation=None precision=None "
    "implementation=None",
    "ragged_dot": "lhs rhs group_sizes precision=None preferred_element_type=None "
    "group_offset=None activation=None * implementation=None",
    "linear_softmax_cross_entropy_loss": "x labels weights * reduction='sum' "
    "precision=None implementation=None",
    "triangle_multiplication": "x mask projection_in_weights gate_in_weights "
    "projection_out_weights gate_out_weights layernorm_in_scale layernorm_in_offset "
    "layernorm_out_scale layernorm_out_offset triangle_type * precision=None "
    "epsilon=1e-06 implementation=None",
}


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def wide(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert signature_of(getattr(tokamax, name)) == SIGNATURES[name]


def test_attention_caps_after_the_bias():
    q, k, v, bias = draw(2, 3, 5, 4, 8), draw(2, 3, 7, 2, 8), draw(2, 3, 7, 2, 6), None
    bias = 3 * draw(2, 1, 4, 5, 7)
    found = tokamax.dot_product_attention(
        *(q, k, v, bias), logits_soft_cap=2.0, local_window_size=(2, 3)
    )
    q, k, v, bias = wide(q, k, v, bias)
    k, v = k.repeat(2, axis=-2), v.repeat(2, axis=-2)
    scores = np.einsum("...tnh,...snh->...nts", q, k) / 8**0.5 + bias
    i, j = np.ogrid[:5, :7]
    seen = (i - 2 <= j) & (j <= i + 3)
    weights = np.where(seen, np.exp(2 * np.tanh(scores / 2)), 0)
    weights /= weights.sum(-1, keepdims=True)
    close(found, np.einsum("...nts,...snh->...tnh", weights, v))


@pytest.mark.parametrize("subtract_mean", [True, False])
def test_layer_norm_over_an_axis(subtract_mean):
    x, scale, offset = draw(3, 5, 4), draw(5), draw(5)
    found = tokamax.layer_norm(
        *(x, scale, offset), axis=1, scale_offset=1.0, subtract_mean=subtract_mean
    )
    x, scale, offset = wide(x, scale, offset)
    x = x - subtract_mean * x.mean(1, keepdims=True)
    y = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6)
    close(found, y * (scale[:, None] + 1) + offset[:, None])


@pytest.mark.parametrize("activation", [None, jax.nn.silu, jax.nn.sigmoid, jnp.abs])
def test_gated_linear_unit(activation):
    x, weights = draw(2, 3, 6), draw(6, 2, 5)
    found = tokamax.gated_linear_unit(x, weights, activation=activation)
    again = tokamax.gated_linear_unit(
        x, (weights[:, 0], weights[:, 1]), activation=activation, precision="highest"
    )
    x, weights = wide(x, weights)
    gate, up = x @ weights[:, 0], x @ weights[:, 1]
    sides = {None: gate, jnp.abs: np.abs(gate), jax.nn.sigmoid: sigmoid(gate)}
    expected = sides.get(activation, gate * sigmoid(gate)) * up
    close(found, expected)
    close(again, expected)


def test_ragged_dot_activates_sums():
    class Sizes:
        value = jnp.array([3, 0, 2])

    lhs, rhs = draw(5, 6), draw(3, 6, 4)
    found = tokamax.ragged_dot(lhs, rhs, Sizes(), activation=jax.nn.relu)
    lhs, rhs = wide(lhs, rhs)
    expected = np.concatenate([lhs[:3] @ rhs[0], lhs[3:] @ rhs[2]])
    close(found, np.maximum(expected, 0))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_linear_softmax_cross_entropy_loss(reduction):
    x, weights, labels = draw(5, 6), draw(6, 9), jnp.array([0, 8, 3, 3, 1])

    def loss(x, weights):
        return tokamax.linear_softmax_cross_entropy_loss(
            x, labels, weights, reduction=reduction
        )

    def plain(x, weights):
        losses = -jax.nn.log_softmax(x @ weights)[jnp.arange(5), labels]
        return losses.sum() if reduction == "sum" else losses.mean()

    found, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(x, weights) for f in (loss, plain)
    )
    jax.tree.map(close, found, expected)
    with pytest.raises(ValueError, match="`reduction` must be"):
        tokamax.linear_softmax_cross_entropy_loss(x, labels, weights, reduction="none")


@pytest.mark.parametrize("kind", ["incoming", "outgoing"])
def test_triangle_multiplication(kind):
    shapes = (4, 2, 3), (4, 2, 3), (3, 5), (4, 5), (4,), (4,), (3,), (3,)
    x, weights = draw(6, 6, 4), [draw(*shape) for shape in shapes]
    mask = jnp.asarray(RNG.random((6, 6)) < 0.7)
    found = tokamax.triangle_multiplication(x, mask, *weights, kind)

    def norm(x, scale, offset):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale + offset

    x, p_in, g_in, p_out, g_out, scale, offset, out_scale, out_offset = wide(
        x, *weights
    )
    z = norm(x, scale, offset)
    a, b = (
        np.asarray(mask)[..., None] * sigmoid(z @ g_in[:, i]) * (z @ p_in[:, i])
        for i in range(2)
    )
    s = np.zeros((6, 6, 3))
    for k in range(6):
        if kind == "outgoing":
            s += a[:, None, k] * b[None, :, k]
        else:
            s += a[k, None, :] * b[k, :, None]
    expected = sigmoid(z @ g_out) * (norm(s, out_scale, out_offset) @ p_out)
    close(found, expected)
    with pytest.raises(ValueError, match="`triangle_type` must be"):
        tokamax.triangle_multiplication(found, mask, *weights, "inward")


def test_several_implementations_and_what_it_lacks():
    x = draw(1, 3, 2, 8)
    found = tokamax.dot_product_attention(x, x, x, implementation=["mosaic", "xla"])
    close(found, tokamax.dot_product_attention(x, x, x, implementation="xla"))
    with pytest.raises(ValueError, match="`implementation` must be"):
        tokamax.layer_norm(x, None, None, implementation=("xla", print))
    with pytest.raises(NotImplementedError, match="`group_offset`"):
        tokamax.ragged_dot(
            draw(2, 3), draw(1, 3, 4), jnp.array([2]), group_offset=jnp.array(0)
        )
