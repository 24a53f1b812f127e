"""moe_ffn against a loop over tokens and experts in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkern import dequantize, moe_ffn, quantize_microscaled
from jaxkern.testing.checks import bf16, case, f32, i32
from jaxkern.testing.interpreter import evaluated
from jaxkern.testing.sharding_checks import mesh_of
from tests.primitives.quant.block_bytes import weight

T, K, E, D, F = 6, 2, 4, 5, 3
CASES = [
    case(
        "plain",
        x=f32(3, 8),
        ids=i32(3, 2, low=-1, high=5),  # some are no expert's
        weights=f32(3, 2),
        gate=f32(4, 16, 8),
        up=f32(4, 16, 8),
        down=f32(4, 8, 16),
        activation="swiglu",
    ),
    case(
        "odd",
        x=bf16(1, 5),
        ids=i32(1, 3, high=2),
        weights=bf16(1, 3),
        gate=bf16(2, 3, 5),
        up=bf16(2, 3, 5),
        down=bf16(2, 5, 3),
        activation="geglu",
        ulps=24.0,
    ),
]


GATES = {
    "swiglu": lambda z: z / (1 + np.exp(-z)),
    "glu": lambda z: 1 / (1 + np.exp(-z)),
    "reglu": lambda z: np.maximum(z, 0),
    "relu2glu": lambda z: np.maximum(z, 0) ** 2,
    "tanhglu": np.tanh,
    "bilinear": lambda z: z,
}


def act(name, gate, up):
    if name in GATES:
        return GATES[name](gate) * up
    if name == "geglu":
        return gate * np.vectorize(math.erfc)(-gate / math.sqrt(2)) / 2 * up
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + np.tanh(u)) * up


def dense_loop(x, ids, weights, gate, up, down, activation="swiglu"):
    """Every expert of every token, one after the other; foreign ids give nothing."""
    y = np.zeros_like(x)
    for t, e, w in zip(
        np.arange(len(x)).repeat(ids.shape[1]),
        ids.ravel(),
        weights.ravel(),
        strict=True,
    ):
        if 0 <= e < len(gate):
            y[t] += w * down[e] @ act(activation, gate[e] @ x[t], up[e] @ x[t])
    return y


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(T, D), (T, K), (E, F, D), (E, F, D), (E, D, F)]
    return [rng.standard_normal(s) for s in shapes]


IDS = {
    "balanced": np.arange(T * K).reshape(T, K) % E,
    "all to one": np.full((T, K), 2),
    "empty experts": np.asarray([[3, 1]] * T),
    "foreign": np.asarray([[-1, 0], [4, 1], [2, 7], [3, 3], [-5, -1], [0, 1]]),
}


@pytest.mark.parametrize("name", IDS)
def test_equals_the_dense_loop(name):
    x, weights, gate, up, down = arguments()
    with jax.enable_x64(True):
        y = jax.jit(moe_ffn)(x, jnp.asarray(IDS[name]), weights, gate, up, down)
        packed = np.concatenate([gate, up], axis=1)
        same = jax.jit(moe_ffn)(x, jnp.asarray(IDS[name]), weights, packed, None, down)
    expected = dense_loop(x, IDS[name], weights, gate, up, down)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(same, expected, rtol=1e-12, atol=1e-14)


def test_few_tokens_are_as_many_are():
    """The others have few, and would not meet the sort of many."""
    x, weights, gate, up, down = arguments()
    ids = jnp.asarray(IDS["foreign"])
    with jax.enable_x64(True):
        few = moe_ffn(x, ids, weights, gate, up, down)
        x, ids, weights = (np.concatenate([a, a]) for a in (x, ids, weights))
        many = moe_ffn(x, ids, weights, gate, up, down)
        assert "moe_ffn_few" not in str(
            jax.make_jaxpr(moe_ffn)(x, ids, weights, gate, up, down)
        )
    np.testing.assert_allclose(many, np.concatenate([few, few]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", ["geglu", "geglu_tanh", *GATES])
def test_activations_are_what_their_names_say(activation):
    x, weights, gate, up, down = arguments()
    ids = IDS["balanced"]
    with jax.enable_x64(True):
        y = moe_ffn(x, ids, weights, gate, up, down, activation=activation)
    expected = dense_loop(x, ids, weights, gate, up, down, activation)
    np.testing.assert_allclose(y, expected, rtol=1e-11)


@pytest.mark.parametrize("activation", ["relu", "relu2", "silu", "tanh", "none"])
def test_experts_without_a_gate(activation):
    x, weights, gate, _, down = arguments()
    act = {
        "relu": GATES["reglu"],
        "relu2": GATES["relu2glu"],
        "silu": GATES["swiglu"],
        "tanh": np.tanh,
        "none": lambda z: z,
    }[activation]
    ids = IDS["foreign"]
    options = dict(gated=False, activation=activation)
    with jax.enable_x64(True):
        y = moe_ffn(x, ids, weights, gate, None, down, **options)
    chosen = ((ids[..., None] == np.arange(E)) * weights[..., None]).sum(1)
    every = np.einsum("edf,tef->ted", down, act(np.einsum("efd,td->tef", gate, x)))
    np.testing.assert_allclose(y, np.einsum("te,ted->td", chosen, every), rtol=1e-11)


def with_biases(x, ids, weights, gate, up, down, biases, weigh_input=False):
    """GPT-OSS: every expert for every token, in the array library of the operands."""
    np_or_jnp = jnp if isinstance(x, jax.Array) else np
    gate_bias, up_bias, down_bias = biases
    chosen = (ids[..., None] == np.arange(E)) * weights[..., None]  # [t k e]
    scale = chosen if weigh_input else (ids[..., None] == np.arange(E)) * 1.0
    read = np_or_jnp.einsum("tke,td->tked", scale, x)
    z = np_or_jnp.einsum("efd,tked->tkef", gate, read) + gate_bias
    u = np_or_jnp.einsum("efd,tked->tkef", up, read) + up_bias
    z, u = np_or_jnp.minimum(z, 1.5), np_or_jnp.clip(u, -1.5, 1.5)
    hidden = z / (1 + np_or_jnp.exp(-1.702 * z)) * (u + 1)
    out = np_or_jnp.einsum("edf,tkef->tked", down, hidden) + down_bias
    weight = (chosen != 0) * 1.0 if weigh_input else chosen
    return np_or_jnp.einsum("tke,tked->td", weight, out)


GPT_OSS = dict(alpha=1.702, limit=1.5, up_offset=1.0)


@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("name", IDS)
def test_biases_and_the_gate_of_gpt_oss(name, weigh_input):
    """And Llama 4's weight on what an expert reads; packed too, and all gradients."""
    x, weights, gate, up, down = arguments()
    rng = np.random.default_rng(9)
    biases = [rng.standard_normal(s) for s in [(E, F), (E, F), (E, D)]]
    ids = IDS[name]
    options = dict(weigh_input=weigh_input, **GPT_OSS)

    def ours(x, weights, gate, up, down, biases):
        return moe_ffn(x, ids, weights, gate, up, down, *biases, **options)

    def dense(x, weights, gate, up, down, biases):
        return with_biases(x, ids, weights, gate, up, down, biases, weigh_input)

    args = (x, weights, gate, up, down, biases)
    with jax.enable_x64(True):
        expected = dense(*args)
        np.testing.assert_allclose(ours(*args), expected, rtol=1e-11, atol=1e-13)
        packed = np.concatenate([gate, up], 1), None, down
        bias = np.concatenate(biases[:2], 1), None, biases[2]
        same = moe_ffn(x, ids, weights, *packed, *bias, **options)
        np.testing.assert_allclose(same, expected, rtol=1e-11, atol=1e-13)

        def grads(f):
            return jax.grad(lambda *a: jnp.sin(f(*a)).sum(), range(6))

        found = jax.tree.leaves(jax.jit(grads(ours))(*args))
        expected = jax.tree.leaves(evaluated(grads(dense), *args))
        for g, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-9, atol=1e-12)


def test_a_bias_is_added_in_float32():
    """256 - 255.5 = 0.5, where a bias in the dtype of x would be -256."""
    x = jnp.zeros((1, D), jnp.bfloat16).at[0, 0].set(256)
    ids, weights = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.bfloat16)
    gate, down = jnp.ones((1, F, D), jnp.bfloat16), jnp.ones((1, D, F), jnp.bfloat16)
    bias, options = jnp.full((1, F), -255.5), dict(gated=False, activation="none")
    y = moe_ffn(x, ids, weights, gate, None, down, bias, **options)
    np.testing.assert_array_equal(np.float32(y), np.full((1, D), F / 2))


def test_gradients_match_those_of_the_dense_sum():
    """In x, the weights and every expert, against JAX on all experts for all tokens."""
    args = arguments()
    ids = IDS["foreign"]

    def dense(x, weights, gate, up, down):
        chosen = (ids[..., None] == np.arange(E)) * weights[..., None]
        hidden = jax.nn.silu(jnp.einsum("td,efd->tef", x, gate))
        hidden = hidden * jnp.einsum("td,efd->tef", x, up)
        return jnp.einsum("tef,edf,te->td", hidden, down, chosen.sum(1))

    def sparse(x, weights, gate, up, down):
        return moe_ffn(x, ids, weights, gate, up, down)

    def grads(f):
        return jax.jit(jax.grad(lambda *a: jnp.sin(f(*a)).sum(), range(5)))(*args)

    with jax.enable_x64(True):
        for g, e in zip(grads(sparse), grads(dense), strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-9, atol=1e-12)


def test_nothing_is_added_in_an_order_that_may_change():
    args = arguments()

    args += [np.ones((E, F)), np.ones((E, F)), np.ones((E, D))]

    def f(*args):
        return moe_ffn(args[0], IDS["balanced"], *args[1:], weigh_input=True).sum()

    gradient = jax.jit(jax.grad(f, range(8))).lower(*args)
    assert "scatter" not in gradient.as_text()


def test_leading_dims_and_dtype():
    x, weights, gate, up, down = map(jnp.float32, arguments())
    ids = jnp.asarray(IDS["balanced"])
    flat = moe_ffn(x, ids, weights, gate, up, down)
    y = moe_ffn(
        x.reshape(2, 3, D).astype(jnp.bfloat16),
        ids.reshape(2, 3, K),
        weights.reshape(2, 3, K),
        gate,
        up,
        down,
    )
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.float32(y).reshape(T, D), flat, rtol=0.1, atol=0.05 * np.abs(flat).max()
    )


def test_quantised_experts():
    x, weights, *_ = arguments()
    x = np.random.default_rng(2).standard_normal((T, 32)).astype(np.float32)
    (gate, g), (up, u), (down, d) = (
        weight("Q8_0", E, 32, 32, seed=s) for s in range(3)
    )
    y = jax.jit(moe_ffn)(x, IDS["balanced"], jnp.float32(weights), gate, up, down)
    expected = dense_loop(np.float64(x), IDS["balanced"], weights, g, u, d)
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", IDS)
def test_packed_experts_of_a_few_tokens_without_a_sort(name):
    """With the biases and the gate of GPT-OSS; values and gradients of decoded ones."""
    _, weights, *_ = arguments()
    rng = np.random.default_rng(2)
    x, weights = jnp.float32(rng.standard_normal((T, 32))), jnp.float32(weights)
    shapes = [(E, 32, 32), (E, 32, 32), (E, 32, 32)]
    packed = [
        quantize_microscaled(jnp.float32(rng.standard_normal(s)), format="mxfp4")
        for s in shapes
    ]
    plain = [dequantize(w) for w in packed]
    biases = [jnp.float32(rng.standard_normal((E, 32))) for _ in range(3)]
    ids = jnp.asarray(IDS[name])

    def f(x, weights, biases, experts):
        return moe_ffn(x, ids, weights, *experts, *biases, **GPT_OSS)

    def gradient(experts):
        def loss(*args):
            return jnp.sin(f(*args, experts)).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    args = x, weights, biases
    text = gradient(packed).lower(*args).as_text()
    assert "stablehlo.sort" not in text and "scatter" not in text
    for found, expected in zip(
        jax.tree.leaves(gradient(packed)(*args)),
        jax.tree.leaves(gradient(plain)(*args)),
        strict=True,
    ):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * scale)
    many = [jnp.concatenate([a, a]) for a in (x, ids, weights)]  # these are sorted
    y = moe_ffn(*many, *packed, *biases, **GPT_OSS)
    np.testing.assert_allclose(y[:T], f(*args, packed), rtol=1e-4, atol=1e-5)
    tangent = jax.jvp(lambda x: f(x, *args[1:], packed), (x,), (x,))[1]
    expected = jax.jvp(lambda x: f(x, *args[1:], plain), (x,), (x,))[1]
    np.testing.assert_allclose(tangent, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "format, k, by_id",
    [("mxfp4", 10, True), ("mxfp4", 11, False), ("nvfp4", 10, False)],
)
def test_what_no_kernel_by_id_takes_is_sorted(format, k, by_id):
    """More than 64 rows, and experts with a factor each."""
    w = quantize_microscaled(jnp.ones((16, 32, 32)), format=format)
    ids = jnp.zeros((6, k), jnp.int32)
    x, weights = jnp.ones((6, 32)), jnp.ones((6, k))
    text = str(jax.make_jaxpr(moe_ffn)(x, ids, weights, w, w, w))
    assert ("microscaled_matmul_id" in text) == by_id


def test_a_wrong_bias_of_packed_experts_is_refused():
    w = quantize_microscaled(jnp.ones((E, 32, 32)), format="mxfp4")
    x, ids = jnp.ones((1, 32)), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(TypeError, match=r"moe_ffn: `gate_bias` must have a number"):
        moe_ffn(x, ids, jnp.ones((1, 2)), w, w, w, jnp.ones((E + 1, 32)))


def test_experts_spread_over_devices():
    """Each device takes the slots of its own experts; one sum brings them together."""
    x, weights, gate, up, down = map(jnp.float32, arguments())
    ids = jnp.asarray(IDS["balanced"])
    mesh = mesh_of(2, AxisType.Auto)

    def local(x, ids, weights, gate, up, down):
        ids = ids - jax.lax.axis_index("m") * gate.shape[0]
        return jax.lax.psum(moe_ffn(x, ids, weights, gate, up, down), "m")

    cut = P("m")
    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), P(), cut, cut, cut), out_specs=P()
    )
    y = jax.jit(f)(x, ids, weights, gate, up, down)
    expected = moe_ffn(x, ids, weights, gate, up, down)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_errors_say_what_to_do():
    x, weights, gate, up, down = arguments()
    with pytest.raises(ValueError, match="moe_ffn: `activation` must be one of swiglu"):
        moe_ffn(x, IDS["balanced"], weights, gate, up, down, activation="silu")
    for wrong, message in [
        (dict(gated=False, activation="swiglu"), "must be one of none, .* gated=False"),
        (dict(gated=False, activation="relu"), "gated=False has no `up`"),
        (dict(activation="reglu", limit=1.0), "belong to activation='swiglu'"),
        (dict(limit=-1.0), "`limit` must be positive"),
    ]:
        with pytest.raises(ValueError, match=f"moe_ffn: .*{message}"):
            moe_ffn(x, IDS["balanced"], weights, gate, up, down, **wrong)
    with pytest.raises(ValueError, match="moe_ffn: `up_bias` needs `up`"):
        bias = np.ones((E, F))
        moe_ffn(x, IDS["balanced"], weights, gate, None, down, None, bias)
    with pytest.raises(
        TypeError, match=r"moe_ffn: `down_bias` must have a number .* 5"
    ):
        moe_ffn(x, IDS["balanced"], weights, gate, up, down, None, None, bias)
    with pytest.raises(TypeError, match=r"moe_ffn: `ids` and `weights` must be"):
        moe_ffn(x[:3], IDS["balanced"], weights, gate, up, down)


def test_weights_that_do_not_fit_are_named():
    """Without this an operator within refuses its own operands: `w` of what?"""
    x, weights, gate, up, down = map(jnp.float32, arguments())
    ids = IDS["balanced"]
    both = jnp.concatenate([gate, up], axis=1)
    for wrong, message in [
        ((gate[..., :-1], up, down), "`gate` must be"),
        ((gate[0], up, down), "`gate` must be"),
        ((both[:, :-1], None, down), r"`gate` must be \[e, 2\*f, gate and up packed"),
        ((gate, up[1:], down), "`up` must be"),
        ((gate, up, down[..., :-1]), "`down` must be"),
        ((gate, up, "down"), "`down` must be array or QuantizedTensor, got 'down'"),
        ((gate.astype(int), up, down), "`gate` must have a dtype of kind Float"),
    ]:
        for rows in (slice(None), slice(1)):  # the sorted rows, and a few tokens
            with pytest.raises(TypeError, match=f"moe_ffn: {message}"):
                moe_ffn(x[rows], ids[rows], weights[rows], *wrong)
