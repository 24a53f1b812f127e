"""quantize_affine: the bits of mx.quantize, the min-max quantiser, packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import dequantize, quantize_affine
from jaxkern.primitives.quant.affine_tensor import BITS, pack_codes, unpack_codes
from jaxkern.testing.checks import case, f32
from tests.primitives.quant.mlx_golden import GOLDEN, KEYS, arrays, tensor

CASES = [
    case("plain", w=f32(2, 3, 32), bits=4, group_size=32),
    case("minmax", w=f32(5, 64), bits=3, quantizer="minmax", packed=False),
    case("empty", w=f32(0, 64), bits=8),
]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("key", KEYS)
def test_the_bits_of_mlx(key, compile):
    expected = tensor(key)
    options = {"bits": expected.bits, "group_size": expected.group_size}

    def quantize(w):
        return quantize_affine(w, **options)

    w = jnp.asarray(GOLDEN["w"]).astype(expected.scales.dtype)
    actual = (jax.jit(quantize) if compile else quantize)(w)
    for name in ("codes", "scales", "biases"):
        a, e = (np.asarray(getattr(t, name)) for t in (actual, expected))
        np.testing.assert_array_equal(a, e, err_msg=name)
    assert arrays(key, "codes")[0].dtype == np.uint32


def test_minmax_by_hand():
    """D17: scale = (max - min) / 15, bias = min; D18: halves round away from zero."""
    w = np.full(32, 0.5, np.float32)
    w[:4] = [-3, 12, -0.5, 1.5]  # scale 1: codes 0, 15, 2.5 -> 3, 4.5 -> 5
    t = quantize_affine(jnp.asarray(w), group_size=32, quantizer="minmax", packed=False)
    assert t.scales == 1 and t.biases == -3
    np.testing.assert_array_equal(t.codes[:5], [0, 15, 3, 5, 4])


def test_a_constant_group_is_its_bias():
    w = jnp.full((2, 32), -7.3)
    t = quantize_affine(w, group_size=32, quantizer="minmax")
    assert (np.asarray(t.scales) == 1).all()
    np.testing.assert_array_equal(dequantize(t), w)


def test_the_two_quantisers_differ_and_mlx_keeps_zero():
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.uniform(-1, 3, (4, 64)), jnp.float32).at[:, 0].set(0)
    mlx, minmax = (quantize_affine(w, quantizer=q) for q in ("mlx", "minmax"))
    assert (
        np.abs(dequantize(mlx)[:, 0]).max()
        < 1e-6
        < np.abs(dequantize(minmax)[:, 0]).min()
    )
    for t in (mlx, minmax):
        error = np.abs(dequantize(t) - w).max(-1)
        assert (error <= 0.51 * np.abs(np.asarray(t.scales))[:, 0]).all()


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_a_stream_of_bits(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 32), np.uint8)
    packed = np.asarray(pack_codes(jnp.asarray(codes), bits))
    stream = [int(c) >> k & 1 for c in codes[1] for k in range(bits)]
    value = sum(bit << k for k, bit in enumerate(stream))
    assert [int(word) for word in packed[1]] == [
        value >> 32 * i & 0xFFFFFFFF for i in range(bits)
    ]
    np.testing.assert_array_equal(unpack_codes(jnp.asarray(packed), bits), codes)


def test_container():
    t = quantize_affine(jnp.ones((3, 5, 64), jnp.bfloat16), bits=6, group_size=32)
    assert (t.shape, t.ndim, t.nbytes) == ((3, 5, 64), 3, 15 * (12 * 4 + 2 * 2 * 2))
    assert t[1, 2:4].shape == (2, 64) and t[1].codes.shape == (5, 12)
    assert repr(t) == "AffineTensor(6 bits / 32, shape=(3, 5, 64))"
    with pytest.raises(TypeError, match="only the 2 leading dims"):
        t[0, 0, 0]
    assert len(jax.tree.leaves(t)) == 3


def test_refusals():
    with pytest.raises(ValueError, match="`bits` must be one of"):
        quantize_affine(jnp.ones(64), bits=7)
    with pytest.raises(ValueError, match="`quantizer` must be one of mlx, minmax"):
        quantize_affine(jnp.ones(64), quantizer="best")
    with pytest.raises(ValueError, match="whole 32-bit words, got group_size=12"):
        quantize_affine(jnp.ones(24), group_size=12)
    with pytest.raises(TypeError, match="d = 65 is not a multiple"):
        quantize_affine(jnp.ones(65))
