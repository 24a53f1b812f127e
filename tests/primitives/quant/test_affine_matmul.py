"""The affine format's products: formula, gradients to the floats, roundings of mlx."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    AffineTensor,
    backend,
    dequantize,
    dequantize_affine,
    linear,
    quantize_affine,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_id,
)
from jaxkern.primitives.quant.affine_matmul import affine_matmul
from jaxkern.testing.checks import Spec, case, f32, i32, uniform
from tests.primitives.quant.mlx_golden import GOLDEN, KEYS, arrays, tensor


def words(*shape: int) -> Spec:
    return Spec(shape, np.uint32, lambda rng, s: rng.integers(0, 2**32, s))


def parts(*lead: int, bits: int = 4, groups: int = 1, unpacked: bool = False) -> dict:
    """Operands and options of one tensor of groups of 32."""
    codes = words(*lead, groups * bits)
    if unpacked:
        codes = Spec(
            (*lead, groups * 32), np.uint8, lambda rng, s: rng.integers(0, 16, s)
        )
    scales = {"scales": uniform(*lead, groups), "biases": f32(*lead, groups)}
    return {"codes": codes, "bits": bits, "group_size": 32, **scales}


CASES = {
    "dequantize_affine": [
        case("bits_4", dtype=None, **parts(4, groups=2)),
        case("bits_3", dtype=None, **parts(2, bits=3)),
    ],
    "affine_matmul": [
        case("bits_4", x=f32(4, 64), **parts(4, groups=2)),
        case("bits_6", x=f32(32), **parts(1, bits=6), full=True),
        case("unpacked", x=f32(0, 32), **parts(4, unpacked=True)),
        case("llama_1b", x=f32(2, 2048), **parts(512, groups=64), full=True),
    ],
    "affine_embedding": [
        case(
            "plain",
            ids=i32(4, 2, low=-1, high=5),
            dtype=None,
            **parts(4),
        ),
    ],
    "affine_matmul_id": [
        case(
            "few_rows",
            x=f32(2, 32),
            ids=i32(2, 1, low=-1, high=4),
            compute_dtype=None,
            **parts(3, 2),
        ),
    ],
}


def random_tensor(
    *shape: int, bits: int = 4, **options
) -> tuple[AffineTensor, np.ndarray]:
    """A tensor and its float64 weights by the formula."""
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    t = quantize_affine(
        jnp.asarray(w), bits=bits, group_size=32, packed=False, **options
    )
    scales, biases = (
        np.repeat(np.asarray(a, np.float64), 32, -1) for a in (t.scales, t.biases)
    )
    packed = quantize_affine(jnp.asarray(w), bits=bits, group_size=32, **options)
    return packed, np.asarray(t.codes) * scales + biases


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_formula(bits):
    w, values = random_tensor(24, 64, bits=bits)
    x = np.random.default_rng(1).normal(size=(2, 3, 64)).astype(np.float32)
    np.testing.assert_allclose(dequantize(w), values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        quantized_matmul(x, w), x @ values.T, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(linear(x, w), x @ values.T, rtol=1e-4, atol=1e-5)
    ids = jnp.array([3, -1, 23, 24])
    rows = np.asarray(quantized_embedding(ids, w))
    np.testing.assert_allclose(rows[[0, 2]], values[[3, 23]], rtol=1e-5, atol=1e-6)
    assert not rows[[1, 3]].any()


def test_unpacked_codes_are_the_same_weights():
    w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)), jnp.float32)
    packed = quantize_affine(w, bits=3, group_size=32)
    unpacked = quantize_affine(w, bits=3, group_size=32, packed=False)
    assert unpacked.codes.shape == (8, 64) and unpacked.codes.dtype == jnp.uint8
    np.testing.assert_array_equal(dequantize(packed), dequantize(unpacked))
    x = jnp.ones((2, 64))
    with backend("xla"):  # a kernel that reads one of them sums in another order
        products = quantized_matmul(x, packed), quantized_matmul(x, unpacked)
    np.testing.assert_array_equal(*products)


def test_gradients_to_x_scales_and_biases():
    w, values = random_tensor(8, 64)
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(3, 64)), rng.normal(size=(3, 8))

    def loss(x, w):
        return jnp.sum(quantized_matmul(x, w) * dy)

    dx, dw = jax.grad(loss, (0, 1), allow_int=True)(jnp.asarray(x, jnp.float32), w)
    np.testing.assert_allclose(dx, dy @ values, rtol=1e-4, atol=1e-4)
    codes = np.asarray(quantize_codes(w)).reshape(8, 2, 32)
    each = (dy.T @ x).reshape(8, 2, 32)
    np.testing.assert_allclose(dw.scales, (each * codes).sum(-1), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dw.biases, each.sum(-1), rtol=1e-4, atol=1e-4)
    assert dw.codes.dtype == jax.dtypes.float0


def quantize_codes(w: AffineTensor) -> jax.Array:
    ones, zeros = jnp.ones_like(w.scales), jnp.zeros_like(w.biases)
    return dequantize(AffineTensor(w.codes, ones, zeros, w.bits, w.group_size))


def test_gradients_of_dequantise_with_frozen_codes():
    """qdq_affine's backward: ds = sum of q dy, db = sum of dy."""
    w, _ = random_tensor(4, 64)
    dy = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    (dw,) = jax.vjp(dequantize, w)[1](jnp.asarray(dy))
    codes = np.asarray(quantize_codes(w))
    expected = (codes * dy).reshape(4, 2, 32).sum(-1)
    np.testing.assert_allclose(dw.scales, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        dw.biases, dy.reshape(4, 2, 32).sum(-1), rtol=1e-4, atol=1e-5
    )


def test_experts():
    w, values = random_tensor(3, 4, 64)
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    ids = np.array([2, 0, 0, 1, 2, 2, 1, 0], np.int32)
    y = quantized_matmul_id(jnp.asarray(x), w, ids, top_k=2)
    expected = np.stack([values[i] @ x[r // 2] for r, i in enumerate(ids)])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("experts", [3, 9], ids=["many_rows", "few_rows"])
def test_gradients_to_the_scales_of_experts(experts):
    """Decoding every expert in turn, and only those that are named."""
    w, _ = random_tensor(experts, 4, 64)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 64)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)
    ids = np.array([2, 0, 2, -1], np.int32)

    def routed(x, w):
        return jnp.sum(dy * quantized_matmul_id(x, w, ids, top_k=2))

    def dense(x, w):
        rows = dequantize(w)[ids] * (ids >= 0)[:, None, None]
        return jnp.einsum("rf,rfd,rd->", dy, rows, jnp.repeat(x, 2, axis=0))

    actual, expected = (
        jax.grad(f, (0, 1), allow_int=True)(x, w) for f in (routed, dense)
    )
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4, atol=1e-4)
    for name in ("scales", "biases"):
        a, e = (getattr(g[1], name) for g in (actual, expected))
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("key", [k for k in KEYS if f"{k}_y" in GOLDEN])
def test_the_bits_and_products_of_mlx(key):
    """D23: mlx computes scale * code + bias in the dtype of the scales."""
    w, (decoded, y) = tensor(key), arrays(key, "decoded", "y")
    dtype = w.scales.dtype
    rounded = dequantize_affine(w, dtype, dequant_dtype=dtype)
    np.testing.assert_array_equal(np.asarray(rounded), decoded)
    x = jnp.asarray(GOLDEN["x"]).astype(dtype)
    size = np.abs(GOLDEN["x"]) @ np.abs(decoded.astype(np.float32)).T
    tolerance = 8 * float(jnp.finfo(dtype).eps) * size
    finite = np.isfinite(y)  # float16 ends at 65504
    actual = np.asarray(quantized_matmul(x, w)).astype(np.float64)
    assert (np.isfinite(actual) == finite).all() and finite.mean() > 0.8
    error = np.abs(actual[finite] - y[finite].astype(np.float64))
    assert (error <= tolerance[finite]).all()


def test_dequantise_in_bfloat16_differs_from_rounding_once():
    w = tensor("bfloat16_4_64")
    once = dequantize(w, dtype=jnp.bfloat16)
    each = dequantize_affine(w, jnp.bfloat16, dequant_dtype=jnp.bfloat16)
    assert (np.asarray(once) != np.asarray(each)).mean() > 0.1
    x = jnp.asarray(GOLDEN["x"])
    np.testing.assert_array_equal(
        affine_matmul(x, w, jnp.bfloat16, dequant_dtype=jnp.bfloat16),
        jnp.dot(x.astype(jnp.bfloat16), each.T, preferred_element_type=jnp.float32),
    )


def test_refusals():
    w, _ = random_tensor(4, 64)
    with pytest.raises(TypeError, match="dim `d` is 32 in `x` but 64 in `w`"):
        quantized_matmul(jnp.ones(32), w)
    wrong = AffineTensor(w.codes, w.scales, w.biases, 8, 32)
    with pytest.raises(TypeError, match="need 16 words of uint32 or 64 of uint8"):
        quantized_matmul(jnp.ones(64), wrong)
    with pytest.raises(ValueError, match="`bits` must be one of"):
        dequantize(AffineTensor(w.codes, w.scales, w.biases, 7, 32))
