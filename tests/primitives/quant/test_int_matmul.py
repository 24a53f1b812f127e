"""Integer weights: formula, signs and zero points, short groups, order, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    IntTensor,
    dequantize,
    linear,
    quantize_int,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_id,
)
from jaxkern.testing.checks import Spec, case, f32, i32, u8, uniform


def int8(*shape: int) -> Spec:
    """Small ones: finite differences of sin(y) need a small y."""
    return Spec(shape, np.int8, lambda rng, s: rng.integers(-3, 4, s))


UINT4 = {"bits": 4, "group_size": 8, "signed": False}
INT8 = {"bits": 8, "group_size": 16, "signed": True}
UINT4_ARRAYS = {"codes": u8(4, 8), "scales": uniform(4, 2), "zeros": uniform(4, 2)}

CASES = {
    "dequantize_int": [
        case("uint4", dtype=None, **UINT4_ARRAYS, **UINT4),
    ],
    "int_matmul": [
        case("uint4", x=f32(4, 16), compute_dtype=None, **UINT4_ARRAYS, **UINT4),
        case(
            "int8",
            x=f32(16),
            codes=int8(1, 16),
            scales=uniform(1, 1),
            compute_dtype=None,
            **INT8,
        ),
    ],
    "int_embedding": [
        case("uint4", ids=i32(4, low=-1, high=5), dtype=None, **UINT4_ARRAYS, **UINT4),
    ],
    "int_matmul_id": [
        case(
            "int8",
            x=f32(2, 16),
            ids=i32(2, 1, low=-1, high=4),
            codes=int8(3, 2, 16),
            scales=uniform(3, 2, 1),
            compute_dtype=None,
            **INT8,
        ),
        case(
            "uint4",
            x=f32(2, 16),
            ids=i32(2, 1, low=-1, high=4),
            codes=u8(3, 2, 8),
            scales=uniform(3, 2, 2),
            zeros=uniform(3, 2, 2),
            compute_dtype=None,
            **UINT4,
        ),
    ],
}


def random_tensor(bits, signed, zeros, groups=3, size=6, d=16, lead=(5,)):
    """A tensor and its float64 weights, written out element by element."""
    rng = np.random.default_rng(0)
    low = -(2 ** (bits - 1)) if signed else 0
    q = rng.integers(low, low + 2**bits, (*lead, d))
    scales = rng.uniform(0.5, 2, (*lead, groups)).astype(np.float32)
    z = rng.uniform(0, 9, (*lead, groups)).astype(np.float32) if zeros else None
    values = np.zeros((*lead, d))
    for i in range(d):
        default = 0 if signed else 2 ** (bits - 1)
        zero = default if z is None else z[..., i // size].astype(np.float64)
        values[..., i] = (q[..., i] - zero) * scales[..., i // size]
    if bits == 4:
        codes = ((q[..., 0::2] & 15) | (q[..., 1::2] & 15) << 4).astype(np.uint8)
    else:
        codes = q.astype(np.int8 if signed else np.uint8)
    options = {"bits": bits, "group_size": size, "signed": signed}
    arrays = [None if a is None else jnp.asarray(a) for a in (codes, scales, z)]
    return IntTensor(*arrays, **options), values


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_formula(bits, signed, zeros):
    """The last group of 6 is short. D30: signed codes reach below zero."""
    w, values = random_tensor(bits, signed, zeros)
    assert w.shape == (5, 16)
    np.testing.assert_allclose(dequantize(w), values, rtol=1e-6, atol=1e-6)
    x = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
    np.testing.assert_allclose(
        quantized_matmul(x, w), x @ values.T, rtol=1e-4, atol=1e-3
    )
    np.testing.assert_allclose(linear(x, w), x @ values.T, rtol=1e-4, atol=1e-3)
    rows = quantized_embedding(jnp.array([4, -1, 0, 5]), w)
    expected = np.stack([values[4], 0 * values[0], values[0], 0 * values[0]])
    np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-6)


def test_d30_unsigned_codes_without_zeros_are_centred():
    codes = jnp.array([[0x80, 0xF7]], jnp.uint8)  # 0, 8, 7, 15
    ones = jnp.ones((1, 1))
    unsigned = IntTensor(codes, ones, bits=4, group_size=4, signed=False)
    signed = IntTensor(codes, ones, bits=4, group_size=4, signed=True)
    np.testing.assert_array_equal(dequantize(unsigned), [[-8, 0, -1, 7]])
    np.testing.assert_array_equal(dequantize(signed), [[0, -8, 7, -1]])


def test_gradients():
    w, values = random_tensor(4, False, True, size=8, groups=2)
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(3, 16)), rng.normal(size=(3, 5))

    def loss(x, w):
        return jnp.sum(quantized_matmul(x, w) * dy)

    dx, dw = jax.grad(loss, (0, 1), allow_int=True)(jnp.asarray(x, jnp.float32), w)
    np.testing.assert_allclose(dx, dy @ values, rtol=1e-4, atol=1e-4)
    each = (dy.T @ x).reshape(5, 2, 8)
    scales = np.asarray(w.scales, np.float64)
    codes_less_zeros = (values.reshape(5, 2, 8).T / scales.T).T
    dscales = (each * codes_less_zeros).sum(-1)
    np.testing.assert_allclose(dw.scales, dscales, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dw.zeros, -scales * each.sum(-1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("stack", [False, True])
def test_order_says_where_columns_belong(stack):
    lead = (2, 5) if stack else (5,)
    w, values = random_tensor(4, False, True, lead=lead)
    order = np.random.default_rng(2).permutation(16).astype(np.int32)
    order = np.stack([order, order[::-1]]) if stack else order
    values_ = values if stack else values[None]
    w = IntTensor(w.codes, w.scales, w.zeros, jnp.asarray(order), 4, 6, False)
    expected = np.zeros_like(values_)
    for k, o in enumerate(np.atleast_2d(order)):
        expected[k][:, o] = values_[k]
    expected = expected if stack else expected[0]
    np.testing.assert_allclose(dequantize(w), expected, rtol=1e-6, atol=1e-6)
    x = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    f = jax.vmap(quantized_matmul, (None, 0)) if stack else quantized_matmul
    product = x @ np.swapaxes(expected, -1, -2)
    np.testing.assert_allclose(f(x, w), product, rtol=1e-4, atol=1e-3)
    if not stack:
        rows = quantized_embedding(jnp.array([3, 1]), w)
        np.testing.assert_allclose(rows, expected[[3, 1]], rtol=1e-6, atol=1e-6)
        with pytest.raises(TypeError, match="rows of a weight with `order`"):
            w[0]
    else:
        with pytest.raises(TypeError, match="experts with `order`"):
            quantized_matmul_id(x[:2], w, jnp.zeros(2, jnp.int32))
        np.testing.assert_allclose(dequantize(w[1]), expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("experts", [2, 9], ids=["many_rows", "few_rows"])
def test_experts(experts):
    w, values = random_tensor(8, True, False, lead=(experts, 5))
    x = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)
    ids = np.array([1, 0, -1, 1, experts, 0, 1, 1], np.int32)
    y = np.asarray(quantized_matmul_id(jnp.asarray(x), w, ids, top_k=2))
    for r, i in enumerate(ids):
        expected = values[i] @ x[r // 2] if 0 <= i < experts else np.zeros(5)
        np.testing.assert_allclose(y[r], expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("group_size", [None, 6, 16])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantising_is_within_half_a_step_and_keeps_zero(bits, zero_point, group_size):
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(3, 4, 16)) + 0.5).astype(np.float32)
    w[0, 0] = 0
    w[0, 1, 3] = 0
    t = quantize_int(w, bits=bits, group_size=group_size, zero_point=zero_point)
    assert t.shape == w.shape and t.signed is not zero_point
    y = np.asarray(dequantize(t))
    size = 16 if group_size is None else group_size
    steps = np.repeat(np.asarray(t.scales), size, axis=-1)[..., :16]
    assert (np.abs(y - w) <= 0.501 * steps).all()
    assert not y[0, 0].any() and y[0, 1, 3] == 0
    if not zero_point:
        largest = np.abs(w).argmax(-1)[1, 2]
        np.testing.assert_allclose(y[1, 2, largest], w[1, 2, largest], rtol=1e-6)


def test_container():
    t = quantize_int(jnp.ones((2, 3, 16)), bits=4, group_size=8, zero_point=True)
    assert (t.ndim, t.nbytes) == (3, 6 * (8 + 2 * 2 * 4))
    assert t[1].shape == (3, 16) and t[1, 2].shape == (16,)
    assert repr(t) == "IntTensor(uint4 / 8, shape=(2, 3, 16))"


def test_refusals():
    w = quantize_int(jnp.ones((4, 16)))
    with pytest.raises(TypeError, match="dim `d` is 8 in `x` but 16 in `w`"):
        quantized_matmul(jnp.ones(8), w)
    with pytest.raises(TypeError, match="`codes` of 8 bits must be uint8, got int8"):
        dequantize(IntTensor(w.codes, w.scales, group_size=16, signed=False))
    with pytest.raises(TypeError, match="has 2 groups of 8, got 1 scales"):
        dequantize(IntTensor(w.codes, w.scales, group_size=8))
    with pytest.raises(TypeError, match="must share their leading dims"):
        dequantize(IntTensor(w.codes, w.scales[:2], group_size=16))
    with pytest.raises(ValueError, match="`bits` must be 4 or 8, got 3"):
        quantize_int(jnp.ones(8), bits=3)
    with pytest.raises(TypeError, match="4 bits need an even d, got 5"):
        quantize_int(jnp.ones(5), bits=4)
