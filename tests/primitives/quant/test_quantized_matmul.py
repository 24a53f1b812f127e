"""quantized_matmul: the product with the decoded weight, its gradient, its dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import quantized_matmul
from jaxkern.primitives.quant.decoded_products import rounded_activations
from jaxkern.testing.checks import bf16, case, f32
from tests.primitives.quant.block_bytes import QTYPES, quiet_bytes, weight

CASES = [
    case("q4_1", x=f32(4, 2, 64), blocks=quiet_bytes(8, 40), qtype="Q4_1"),
    case("q8_0_vector", x=f32(32), blocks=quiet_bytes(16, 34), qtype="Q8_0"),
    case("q4_k", x=f32(3, 256), blocks=quiet_bytes(5, 144), qtype="Q4_K"),
    case("q6_k_one_row", x=bf16(1, 256), blocks=quiet_bytes(1, 210), qtype="Q6_K"),
    case("empty", x=f32(0, 32), blocks=quiet_bytes(8, 18), qtype="Q4_0"),
    case("smollm2_down", x=bf16(2, 1536), blocks=quiet_bytes(576, 960), qtype="Q4_1"),
]


@pytest.mark.parametrize("rows", [(), (2, 1), (2, 3)])
@pytest.mark.parametrize("qtype", QTYPES)
def test_formula(qtype, rows):
    """Few rows and many: two ways to the same sums."""
    w, values = weight(qtype, 24, 512)
    x = np.random.default_rng(1).normal(size=(*rows, 512)).astype(np.float32)
    y = quantized_matmul(jnp.asarray(x), w)
    expected = x.astype(np.float64) @ values.T
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("qtype", ["Q4_1", "Q6_K", "NVFP4"])
def test_gradient_with_respect_to_x(qtype):
    w, values = weight(qtype, 24, 256)
    dy = np.random.default_rng(1).normal(size=(3, 24)).astype(np.float32)
    x = jnp.ones((3, 256))
    (dx,) = jax.vjp(lambda x: quantized_matmul(x, w), x)[1](jnp.asarray(dy))
    expected = dy.astype(np.float64) @ values
    np.testing.assert_allclose(dx, expected, atol=1e-5 * np.abs(expected).max())


def test_the_weight_is_a_constant_of_differentiation():
    w, _ = weight("Q8_0", 4, 32)
    f = jax.grad(lambda w, x: quantized_matmul(x, w).sum(), allow_int=True)
    grad = f(w, jnp.ones(32))
    assert grad.blocks.dtype == jax.dtypes.float0


def test_compute_dtype_rounds_both_operands():
    w, values = weight("Q5_0", 8, 64)
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    rounded = [
        np.asarray(a).astype(jnp.bfloat16).astype(np.float64) for a in (x, values)
    ]
    y = quantized_matmul(jnp.asarray(x), w, compute_dtype=jnp.bfloat16)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, rounded[0] @ rounded[1].T, rtol=1e-5)
    exact = x @ values.T
    assert np.abs(y - exact).max() > 1e-4 * np.abs(exact).max()


def test_float64_activations_stay_float64():
    with jax.enable_x64(True):
        w, values = weight("Q4_K", 8, 256)
        x = np.random.default_rng(1).normal(size=(3, 256))
        y = quantized_matmul(jnp.asarray(x), w)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, x @ values.T, rtol=1e-12)


def test_vmap_over_a_stack_of_experts():
    w, values = weight("Q4_K", 3, 8, 256)
    x = np.random.default_rng(1).normal(size=(3, 2, 256)).astype(np.float32)
    y = jax.vmap(quantized_matmul)(jnp.asarray(x), w)
    expected = np.einsum("ebd,efd->ebf", x, values)
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


def test_refusals():
    w, _ = weight("Q4_0", 3, 4, 64)
    with pytest.raises(TypeError, match="`w` must have 2 dims, got \\(3, 4, 64\\)"):
        quantized_matmul(jnp.ones(64), w)
    with pytest.raises(TypeError, match="dim `d` is 32 in `x` but 64 in `w`"):
        quantized_matmul(jnp.ones(32), w[0])
    with pytest.raises(TypeError, match="`w` must be a quantised tensor"):
        quantized_matmul(jnp.ones(64), jnp.ones((4, 64)))
    with pytest.raises(TypeError, match="`x` must have a dtype of kind Float"):
        quantized_matmul(jnp.ones(64, jnp.int32), w[0])


def test_int8_activations_have_the_documented_quotient_as_scale():
    """To the bit, as ggml and the C++ kernels divide: XLA multiplied by 1 / 127.

    A scale that is off in the last bit is below every tolerance of a product.
    """
    x = np.random.default_rng(0).normal(size=(500, 32)).astype(np.float32)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    expected = np.rint(x / scale).astype(np.float32) * scale
    for f in (rounded_activations, jax.jit(rounded_activations, static_argnums=1)):
        found = f(jnp.asarray(x), jnp.int8)
        # x + (rounded - x), which is straight through, rounds once more
        np.testing.assert_array_equal(found, x + (expected - x))
