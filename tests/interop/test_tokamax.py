"""Against formulas in float64, and the signatures of tokamax 0.0.17."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
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
    "group_offset=None activation=None manual_axis_type=None * implementation=None "
    "bypass_device_check=None zero_initialize=False fuse_gateup_activation=None",
    "ragged_dot_general": "lhs rhs group_sizes ragged_dot_dimension_numbers "
    "precision=None preferred_element_type=None group_offset=None activation=None "
    "manual_axis_type=None * implementation=None bypass_device_check=None "
    "zero_initialize=False fuse_gateup_activation=None",
    "generate_ragged_dot_group_sizes": "* m num_groups p=None seed=0",
    "linear_softmax_cross_entropy_loss": "x labels weights * reduction='sum' "
    "precision=None implementation=None",
    "triangle_multiplication": "x mask projection_in_weights gate_in_weights "
    "projection_out_weights gate_out_weights layernorm_in_scale layernorm_in_offset "
    "layernorm_out_scale layernorm_out_offset triangle_type * precision=None "
    "epsilon=1e-06 implementation=None",
}

NAMES = {  # of `tokamax/__init__.py`, without its version
    *SIGNATURES,
    *("AutotuningResult", "BatchedShapeDtype", "BenchmarkData", "BoundArguments"),
    *("DISABLE_JAX_EXPORT_CHECKS", "DotProductAttentionImplementation", "Op"),
    *("RaggedDotGroupSizes", "autotune", "autotuning", "benchmark", "benchmarking"),
    *("config", "ops", "snake_case_name", "standardize_function"),
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


@pytest.mark.parametrize(
    "activation", [None, jax.nn.silu, jax.nn.sigmoid, jax.nn.gelu, jnp.abs]
)
def test_gated_linear_unit(activation):
    x, weights = draw(2, 3, 6), draw(6, 2, 5)
    found = tokamax.gated_linear_unit(x, weights, activation=activation)
    again = tokamax.gated_linear_unit(
        x, (weights[:, 0], weights[:, 1]), activation=activation, precision="highest"
    )
    x, weights = wide(x, weights)
    gate, up = x @ weights[:, 0], x @ weights[:, 1]
    sides = {None: gate, jnp.abs: np.abs(gate), jax.nn.sigmoid: sigmoid(gate)}
    sides[jax.nn.gelu] = gate * sigmoid(1.5957691216 * (gate + 0.044715 * gate**3))
    expected = sides.get(activation, gate * sigmoid(gate)) * up
    close(found, expected)
    close(again, expected)


def test_ragged_dot_activates_sums():
    sizes = tokamax.RaggedDotGroupSizes(jnp.array([3, 0, 2]), [2, 2, 1])
    lhs, rhs = draw(5, 6), draw(3, 6, 4)
    found = tokamax.ragged_dot(lhs, rhs, sizes, activation=jax.nn.relu)
    lhs, rhs = wide(lhs, rhs)
    expected = np.concatenate([lhs[:3] @ rhs[0], lhs[3:] @ rhs[2]])
    close(found, np.maximum(expected, 0))


def test_ragged_dot_general_of_output_major_weights():
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    lhs, rhs, sizes = draw(5, 6), draw(3, 4, 6), jnp.array([3, 0, 2])

    @jax.jit
    def run(lhs, rhs, sizes):
        return tokamax.ragged_dot_general(
            *(lhs, rhs, sizes, numbers), activation=jnp.abs, implementation="xla"
        )

    found = run(lhs, rhs, tokamax.RaggedDotGroupSizes(sizes, 5))
    expected = jax.lax.ragged_dot_general(lhs, rhs, sizes, numbers)
    close(found, jnp.abs(expected))


def test_the_gate_of_a_product_and_what_it_refuses():
    lhs, rhs, sizes = draw(5, 6), draw(2, 6, 8), jnp.array([3, 2])
    gate, up = jnp.split(jax.lax.ragged_dot(lhs, rhs, sizes), 2, axis=1)
    for name, function in (("silu", jax.nn.silu), ("gelu", jax.nn.gelu)):
        found = tokamax.ragged_dot(
            *(lhs, rhs, sizes),
            activation=jnp.negative,
            fuse_gateup_activation=name,
            zero_initialize=True,
            bypass_device_check=False,
        )
        close(found, -function(gate) * up)
    with pytest.raises(ValueError, match=r"`fuse_gateup_activation` must .*relu"):
        tokamax.ragged_dot(lhs, rhs, sizes, fuse_gateup_activation="relu")
    with pytest.raises(NotImplementedError, match="ragged_dot: `manual_axis_type`"):
        tokamax.ragged_dot(lhs, rhs, sizes, manual_axis_type="x")


def test_sizes_that_stand_for_others():
    drawn = tokamax.generate_ragged_dot_group_sizes(m=50, num_groups=4)
    sizes = tokamax.RaggedDotGroupSizes(jnp.array([50, 0, 0, 0]), 50)
    assert sizes.representative_value == drawn and sum(drawn) == 50
    uneven = tokamax.generate_ragged_dot_group_sizes(m=9, num_groups=2, p=[0.0, 1.0])
    assert uneven == (0, 9)
    with pytest.raises(ValueError, match="one size a group, got 1 for"):
        tokamax.RaggedDotGroupSizes(jnp.array([1, 2]), [3])


def test_its_other_names_say_what_there_is():
    assert NAMES - {*tokamax.__all__} == {*tokamax.LACKING}
    assert {*tokamax.__all__} <= NAMES
    with pytest.raises(AttributeError, match=r"`autotune`. Here it is jaxkern\.t"):
        operator.attrgetter("autotune")(tokamax)
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        operator.attrgetter("attention")(tokamax)


def test_the_checks_that_jax_export_leaves_out():
    checks = tokamax.DISABLE_JAX_EXPORT_CHECKS
    x = jnp.ones((2, 8))
    f = jax.jit(lambda x: tokamax.layer_norm(x, None, None))
    exported = jax.export.export(f, platforms=("cuda",), disabled_checks=checks)(x)
    assert exported.out_avals[0].shape == (2, 8)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_linear_softmax_cross_entropy_loss(reduction):
    x, weights, labels = draw(5, 6), draw(6, 9), jnp.array([0, 8, 3, 3, 1])

    def loss(x, weights):
        return tokamax.linear_softmax_cross_entropy_loss(
            x, labels, weights, reduction=reduction
        )

    def plain(x, weights):
        losses = -jax.nn.log_softmax(x @ weights)[jnp.arange(5), labels]
        reductions = {"sum": losses.sum(), "mean": losses.mean(), "none": losses}
        return reductions[reduction]

    def weighed(f):
        """The value, and the gradients of a sum in which each loss counts otherwise."""
        y, pull = jax.vjp(f, x, weights)
        return y, pull(1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))

    found, expected = (jax.jit(weighed, static_argnums=0)(f) for f in (loss, plain))
    jax.tree.map(close, found, expected)
    with pytest.raises(ValueError, match="`reduction` must be"):
        tokamax.linear_softmax_cross_entropy_loss(x, labels, weights, reduction="all")


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
    quantised = jaxkern.quantize_int(draw(4, 3).T)
    with pytest.raises(TypeError, match="ragged_dot: `rhs` must be an array, got Int"):
        tokamax.ragged_dot(draw(2, 3), quantised, jnp.array([2]))
