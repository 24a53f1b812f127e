"""Products with what stands around them: one op equals the ops in turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    dequantize,
    interleave,
    quantized_matmul,
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    quantized_swiglu,
)
from jaxkern.testing.checks import bf16, case, f32
from tests.primitives.quant.block_bytes import quiet_bytes, weight

CASES = {
    "interleaved_rms_norm_matmul": [
        case(
            "q4_1",
            x=f32(2, 64),
            tiles=quiet_bytes(2, 640),
            norm=f32(64),
            qtype="Q4_1",
            eps=1e-5,
        ),
        case(
            "q8_0_vector",
            x=bf16(32),
            tiles=quiet_bytes(1, 544),
            norm=bf16(32),
            qtype="Q8_0",
            eps=0.5,
        ),
    ],
    "interleaved_swiglu": [
        case(
            "q4_1",
            x=f32(2, 64),
            tiles=quiet_bytes(2, 1, 640),
            norm=f32(64),
            qtype="Q4_1",
            eps=1e-5,
        ),
        case(
            "q8_0_vector",
            x=bf16(32),
            tiles=quiet_bytes(2, 1, 544),
            norm=None,
            qtype="Q8_0",
            eps=0.0,
        ),
        case(
            "empty",
            x=f32(0, 32),
            tiles=quiet_bytes(2, 1, 288),
            norm=None,
            qtype="Q4_0",
            eps=0.0,
        ),
        case(
            "gelu_up",
            x=f32(2, 32),
            tiles=quiet_bytes(1, 1, 544),
            norm=f32(32),
            up=f32(2, 1, 16),
            qtype="Q8_0",
            eps=1e-5,
            activation="gelu_tanh",
        ),
    ],
    "interleaved_matmul_add": [
        case(
            "q4_1",
            x=f32(2, 64),
            tiles=quiet_bytes(2, 640),
            residual=f32(2, 2, 16),
            qtype="Q4_1",
        ),
        case(
            "q8_0_vector",
            x=bf16(32),
            tiles=quiet_bytes(1, 544),
            residual=bf16(1, 16),
            qtype="Q8_0",
        ),
    ],
}
for cases in CASES.values():
    for one in cases:
        one.arguments["compute_dtype"] = None
CASES |= {
    "dense_rms_norm_matmul": [
        case(
            "float32",
            **dict(x=f32(2, 24), w=f32(16, 24), norm=f32(24), bias=f32(16), eps=1e-5),
        ),
        case("wide", x=bf16(512), w=bf16(32, 512), norm=f32(512), eps=0.5),
    ],
    "dense_swiglu": [
        case("float32", x=f32(2, 24), w=f32(2, 8, 24), norm=f32(24), eps=1e-5),
        case("wide", x=bf16(1, 512), w=bf16(2, 16, 512), norm=None, eps=0.0),
        case("empty", x=f32(0, 24), w=f32(2, 8, 24), norm=None, eps=0.0),
        case(
            "gelu_up",
            **dict(x=f32(2, 24), w=f32(1, 8, 24), norm=f32(24), up=f32(2, 8)),
            **dict(eps=1e-5, activation="gelu_tanh"),
        ),
    ],
    "dense_matmul_add": [
        case(
            "float32",
            **dict(x=f32(2, 24), w=f32(16, 24), residual=f32(2, 16), bias=f32(16)),
        ),
        case("wide", x=bf16(512), w=bf16(32, 512), residual=bf16(32)),
    ],
}
for op in ("dense_swiglu", "interleaved_swiglu"):
    for one in CASES[op]:
        one.arguments.setdefault("activation", "silu")


@pytest.mark.parametrize("kind", ["rows of the file", "interleaved", "an array"])
def test_formulas_in_float64(kind):
    w, values = weight("Q4_K", 64, 256)
    if kind != "rows of the file":
        w = interleave(w) if kind == "interleaved" else dequantize(w)
    rng = np.random.default_rng(0)
    x, residual = rng.normal(size=(3, 256)), rng.normal(size=(3, 64))
    x32 = jnp.asarray(x, jnp.float32)
    product = np.asarray(x32, np.float64) @ values.T
    gate, up = product[:, :32], product[:, 32:]
    y = quantized_swiglu(x32, w)
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-3)
    y = quantized_matmul_add(x32, w, jnp.asarray(residual, jnp.float32))
    np.testing.assert_allclose(y, residual + product, rtol=1e-5, atol=1e-4)
    norm = jnp.asarray(rng.normal(size=256), jnp.float32)
    normal = np.asarray(x32, np.float64)
    normal /= np.sqrt((normal**2).mean(-1, keepdims=True) + 0.5)
    normal *= np.asarray(norm)
    y = quantized_rms_norm_matmul(x32, norm, w, eps=0.5)
    product = normal @ values.T
    np.testing.assert_allclose(y, product, rtol=1e-5, atol=1e-4)
    gate, up = product[:, :32], product[:, 32:]
    expected = gate / (1 + np.exp(-np.maximum(gate, -700))) * up
    y = quantized_swiglu(x32, w, norm, eps=0.5)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)
    gelu = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    y = quantized_swiglu(x32, w, norm, eps=0.5, activation="gelu_tanh")
    np.testing.assert_allclose(y, gelu * up, rtol=1e-4, atol=1e-3)
    half = jax.tree.map(lambda leaf: leaf[: len(leaf) // 2], w)  # the gate's
    beside = jnp.asarray(residual[:, :32], jnp.float32)
    y = quantized_swiglu(x32, half, norm, beside, eps=0.5, activation="gelu_tanh")
    np.testing.assert_allclose(y, gelu * residual[:, :32], rtol=1e-4, atol=1e-3)


def test_int8_activations_have_a_straight_through_gradient():
    w = interleave(weight("Q4_1", 32, 64)[0])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64)), jnp.float32)
    residual = jnp.ones((2, 32))

    def loss(x, residual, compute_dtype):
        norm = jnp.linspace(0.5, 2, 64)
        y = quantized_swiglu(x, w, norm, compute_dtype=compute_dtype)
        y += quantized_rms_norm_matmul(x, norm, w, compute_dtype=compute_dtype)[:, :16]
        z = quantized_matmul_add(x, w, residual, compute_dtype=compute_dtype)
        return jnp.sum(y) + 2 * jnp.sum(z)

    grad = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    exact, rounded = grad(x, residual, None), grad(x, residual, jnp.int8)
    np.testing.assert_array_equal(rounded[1], np.full((2, 32), 2.0))
    np.testing.assert_allclose(rounded[0], exact[0], atol=0.05 * abs(exact[0]).max())


def test_errors():
    w = interleave(weight("Q4_0", 32, 32)[0])
    with pytest.raises(TypeError, match=r"`residual` must be float32 \(1, 32\), got"):
        quantized_matmul_add(jnp.ones((1, 32)), w, jnp.ones(32))
    with pytest.raises(TypeError, match="dim `d` is 64 in `x` but 32 in `w`"):
        quantized_swiglu(jnp.ones((1, 64)), w)
    with pytest.raises(TypeError, match="dim `d` is 32 in `x` but 16 in `norm`"):
        quantized_rms_norm_matmul(jnp.ones((1, 32)), jnp.ones(16), w)
    with pytest.raises(TypeError, match="even last dim"):
        quantized_swiglu(jnp.ones((1, 32)), weight("Q4_0", 33, 32)[0])
    with pytest.raises(
        TypeError, match=r"_swiglu: `up` must be float32 \(1, 32\), got"
    ):
        quantized_swiglu(jnp.ones((1, 32)), w, up=jnp.ones((1, 16)))
    with pytest.raises(ValueError, match="`activation` must be 'silu' or 'gelu_tanh'"):
        quantized_swiglu(jnp.ones((1, 32)), w, activation="gelu")


@pytest.mark.parametrize("kind", ["dense", "GGUF", "interleaved"])
def test_the_sums_are_what_is_preferred(kind):
    """Results had the dtype of x in all tests: with float32 they are those of an x in
    float32, in bfloat16 those rounded once."""
    w, _ = weight("Q8_0", 32, 32)
    w = {
        "dense": lambda: dequantize(w, dtype=jnp.bfloat16),
        "GGUF": lambda: w,
        "interleaved": lambda: interleave(w),
    }[kind]()
    rng = np.random.default_rng(0)
    x, norm, residual = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16)
        for s in ((3, 32), 32, (3, 32))
    )

    def each(x, residual, **options):
        both = [
            quantized_rms_norm_matmul(x, norm, w, **options),
            quantized_swiglu(x, w, norm, **options),
            quantized_matmul_add(x, w, residual, **options),
        ]
        if kind == "GGUF":
            both.append(quantized_matmul(x, w, **options))
        return both

    wide = jnp.float32
    expected = each(x.astype(wide), residual.astype(wide))
    found = each(x, residual, preferred_element_type=wide)
    for y, e in zip(found, expected, strict=True):
        assert y.dtype == wide
        np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-5)
    narrow = each(
        x.astype(wide), residual.astype(wide), preferred_element_type="bfloat16"
    )
    for y, e in zip(narrow, expected, strict=True):
        np.testing.assert_array_equal(y, e.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="swiglu: `preferred_element_type` must be"):
        quantized_swiglu(x, w, norm, preferred_element_type=jnp.int32)
