"""GPTQ, AWQ and linear nibbles: packed here as their own tools pack them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    dequantize,
    int4_from_awq,
    int4_from_gptq,
    int4_from_linear,
    int4_to_linear,
    quantized_matmul,
)

D, F, GROUP = 32, 16, 8
RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 16, (D, F))
ZEROS = RNG.integers(0, 16, (D // GROUP, F))
SCALES = RNG.uniform(0.5, 2, (D // GROUP, F)).astype(np.float16)


def words(values: np.ndarray, axis: int, order=range(8)) -> np.ndarray:
    """Eight values along an axis in an int32, `order[i]` in nibble i."""
    values = np.moveaxis(values.astype(np.uint32), axis, -1)
    eights = values.reshape(*values.shape[:-1], -1, 8)
    packed = sum(eights[..., k] << np.uint32(4 * i) for i, k in enumerate(order))
    return jnp.asarray(np.moveaxis(np.asarray(packed).view(np.int32), -1, axis))


def weights(group: np.ndarray) -> np.ndarray:
    """`[f, d]`, input i in group[i]."""
    w = (CODES - ZEROS[group]) * SCALES[group].astype(np.float64)
    return w.T


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(version, act_order):
    """Version 1 stores zero - 1: a zero point of 0 is the nibble 15."""
    assert (ZEROS == 0).any()
    group = np.arange(D) // GROUP
    if act_order:
        group = RNG.permutation(group)
    stored = (ZEROS - 1) % 16 if version == 1 else ZEROS
    w = int4_from_gptq(
        words(CODES, 0),
        words(stored, 1),
        jnp.asarray(SCALES),
        jnp.asarray(group, jnp.int32),
        version=version,
    )
    assert w.shape == (F, D) and (w.order is not None) == act_order
    np.testing.assert_array_equal(dequantize(w), weights(group))
    x = np.random.default_rng(1).normal(size=(3, D)).astype(np.float32)
    np.testing.assert_allclose(
        quantized_matmul(x, w), x @ weights(group).T, rtol=1e-4, atol=1e-3
    )


def test_gptq_without_g_idx():
    w = int4_from_gptq(words(CODES, 0), words(ZEROS, 1), jnp.asarray(SCALES), version=2)
    np.testing.assert_array_equal(dequantize(w), weights(np.arange(D) // GROUP))


def test_awq():
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    w = int4_from_awq(
        words(CODES, 1, order), words(ZEROS, 1, order), jnp.asarray(SCALES)
    )
    np.testing.assert_array_equal(dequantize(w), weights(np.arange(D) // GROUP))


@pytest.mark.parametrize("zeros", [None, 0.0, 8.0])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("d, f, size", [(32, 16, 8), (6, 3, 4)])
def test_linear_nibbles(d, f, size, signed, zeros):
    """D30: unsigned codes have zero 8 unless told; rlx's symmetric weights have 0."""
    codes = np.random.default_rng(0).integers(0, 16, (d, f)) - 8 * signed
    flat = codes.ravel() & 15
    packed = jnp.asarray((flat[0::2] | flat[1::2] << 4).astype(np.uint8))
    scales = np.random.default_rng(1).uniform(1, 2, (-(-d // size), f))
    scales = scales.astype(np.float32)
    z = None if zeros is None else jnp.full_like(scales, zeros)
    w = int4_from_linear(
        packed, jnp.asarray(scales), z, d=d, signed=signed, group_size=size
    )
    zero = zeros if zeros is not None else 0 if signed else 8
    expected = (codes - zero) * scales[np.arange(d) // size]
    np.testing.assert_array_equal(dequantize(w), expected.T.astype(np.float32))
    np.testing.assert_array_equal(int4_to_linear(w), packed)


def test_refusals():
    qweight, qzeros, scales = words(CODES, 0), words(ZEROS, 1), jnp.asarray(SCALES)
    with pytest.raises(TypeError, match=r"`qzeros` \[groups, 2\], got"):
        int4_from_gptq(qweight, qzeros[:, :1], scales)
    with pytest.raises(TypeError, match="each of 4 groups 8 times"):
        int4_from_gptq(qweight, qzeros, scales, jnp.zeros(D, jnp.int32))
    with pytest.raises(ValueError, match="`version` must be 1 or 2"):
        int4_from_gptq(qweight, qzeros, scales, version=3)
    with pytest.raises(TypeError, match="must have 256 bytes"):
        int4_from_linear(jnp.zeros(3, jnp.uint8), scales, d=D)
