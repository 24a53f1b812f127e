"""quantize_vectors: errors as the tables say, codes as their layout says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard

from jaxkern import (
    Float8Codec,
    IntCodec,
    QuantizedVectors,
    TurboQuantCodec,
    dequantize_vectors,
    lloyd_max_codebook,
    lloyd_max_error,
    quantize_straight_through,
    quantize_vectors,
    rotation_signs,
    turboquant_decode,
    turboquant_encode,
)
from jaxkern.testing.checks import bf16, case, f32, u8, uniform

TQ4 = TurboQuantCodec(4, group=8)
TQ_MIXED = TurboQuantCodec(2.25)

CASES = {
    "quantize_vectors": [
        case("turboquant", x=f32(8, 2, 16), codec=TQ4),
        case("mixed_bits", x=bf16(3, 32), codec=TQ_MIXED),
        case("of_nothing", x=f32(0, 24), codec=IntCodec(4, group=8)),
        case("gemma4", full=True, x=bf16(64, 8, 256), codec=TurboQuantCodec(8)),
    ],
    "dequantize_vectors": [
        case("turboquant", codes=u8(8, 2, 8), scales=uniform(8, 2, 2), codec=TQ4),
        case(
            "rotated",
            codes=u8(3, 9),
            scales=uniform(3, 1),
            codec=TQ_MIXED,
            unrotate=False,
        ),
        case(
            "int4_of_nothing", codes=u8(0, 12), scales=f32(0, 3), codec=IntCodec(4, 8)
        ),
    ],
}


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def relative_error(x, y):
    """Mean squared error of a coordinate, in units of its variance."""
    return float(jnp.mean((x - y) ** 2) / jnp.mean(x**2))


@pytest.mark.parametrize("bits", range(1, 9))
def test_error_of_normal_numbers_is_the_table(bits):
    x = normal(128, 2048)
    codec = TurboQuantCodec(bits, group=None, seed=0)
    y = dequantize_vectors(quantize_vectors(x, codec))
    assert abs(relative_error(x, y) / lloyd_max_error(bits) - 1) < 0.01


def test_error_does_not_depend_on_the_input():
    """Outliers and constant vectors: the rotation makes them normal."""
    outliers = normal(64, 256) * jnp.where(jnp.arange(256) % 64 == 3, 50.0, 1.0)
    for x in (outliers, outliers**3, jnp.abs(outliers) + 5):
        y = turboquant_decode(turboquant_encode(x, 4))
        assert relative_error(x, y) < 1.25 * lloyd_max_error(4)


def test_mixed_mode_has_the_error_of_its_parts_and_2_25_bits():
    x = normal(64, 1024)
    codec = TurboQuantCodec(2.25, group=None, seed=0)
    encoded = quantize_vectors(x, codec)
    expected = lloyd_max_error(3) / 4 + lloyd_max_error(2) * 3 / 4
    error = relative_error(x, dequantize_vectors(encoded))
    assert abs(error / expected - 1) < 0.02
    assert encoded.codes.size * 8 == 2.25 * x.size


@pytest.mark.parametrize("bits", [1, 2, 2.25, 3, 4, 5, 6, 7, 8])
def test_codes_take_the_bits_that_they_are_named_by(bits):
    encoded = turboquant_encode(normal(3, 64), bits)
    assert encoded.codes.shape == (3, bits * 8) and encoded.codes.dtype == jnp.uint8
    assert encoded.scales.shape == (3, 1) and encoded.shape == (3, 64)


def by_hand(x, levels, group):
    """Levels and scales of x `[n, d]` in float64 NumPy, by the definition."""
    n, d = x.shape
    y = x @ (hadamard(d) @ np.diag(rotation_signs(d)) / np.sqrt(d)).T
    y = y.reshape(n, -1, group)
    scales = np.sqrt((y**2).mean(-1))
    z = (y / scales[..., None]).reshape(n, d)
    return abs(z[..., None] - levels).argmin(-1), scales


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_formula_and_layout(bits):
    """Codes by search over all levels, packed one by one: planes, low bits first."""
    x = np.asarray(normal(3, 32), np.float64)
    numbers, scales = by_hand(x, lloyd_max_codebook(bits), group=16)
    packed = []
    below = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            part = numbers >> below & (2**width - 1)
            per = 8 // width
            bytes_ = sum(part[:, i::per] << (width * i) for i in range(per))
            packed.append(bytes_)
            below += width
    encoded = turboquant_encode(jnp.asarray(x, jnp.float32), bits, group=16)
    np.testing.assert_array_equal(encoded.codes, np.concatenate(packed, axis=1))
    np.testing.assert_allclose(encoded.scales, scales, rtol=1e-6)
    rotated = turboquant_decode(encoded, unrotate=False)
    expected = lloyd_max_codebook(bits)[numbers] * scales.repeat(16, axis=1)
    np.testing.assert_allclose(rotated, expected, atol=1e-6)
    matrix = hadamard(32) @ np.diag(rotation_signs(32)) / np.sqrt(32)
    np.testing.assert_allclose(turboquant_decode(encoded), expected @ matrix, atol=2e-6)


def test_four_bits_are_nibbles_with_the_even_dim_below():
    encoded = turboquant_encode(normal(1, 16), 4)
    levels = turboquant_decode(encoded, unrotate=False) / encoded.scales
    low, high = encoded.codes & 15, encoded.codes >> 4
    table = jnp.asarray(lloyd_max_codebook(4), jnp.float32)
    np.testing.assert_allclose(levels[:, 0::2], table[low], rtol=1e-6)
    np.testing.assert_allclose(levels[:, 1::2], table[high], rtol=1e-6)


def test_512_dims_have_a_scale_for_each_half():
    """The rotation runs over all 512, and halves of unequal size keep their error."""
    x = normal(2, 512)
    encoded = turboquant_encode(x)
    assert encoded.scales.shape == (2, 2)
    numbers, scales = by_hand(np.asarray(x, np.float64), lloyd_max_codebook(4), 256)
    np.testing.assert_allclose(encoded.scales, scales, rtol=1e-6)
    np.testing.assert_array_equal(
        encoded.codes, numbers[:, 0::2] + 16 * numbers[:, 1::2]
    )


def test_a_number_midway_takes_the_lower_level():
    codebook = (-3.0, -1.0, 1.0, 3.0)
    codes = TurboQuantCodec(2, codebook=codebook).codes(
        jnp.array([-9.0, -2.0, -1.9, 0.0, 0.1, 2.0, 2.1])
    )
    np.testing.assert_array_equal(codes, [0, 0, 1, 1, 2, 2, 3])


def test_a_foreign_codebook():
    x = normal(4, 64)
    table = tuple(lloyd_max_codebook(4))
    ours, foreign = turboquant_encode(x), turboquant_encode(x, codebook=table)
    np.testing.assert_array_equal(ours.codes, foreign.codes)
    wide = turboquant_encode(x, codebook=tuple(1.5 * v for v in table))
    y = turboquant_decode(wide)
    assert relative_error(x, y) > 1.5 * lloyd_max_error(4)
    np.testing.assert_allclose(
        jnp.unique(turboquant_decode(wide[0], unrotate=False) / wide.scales[0]),
        np.array(table)[np.unique(np.asarray(wide[0].codes)[:, None] >> [0, 4] & 15)]
        * 1.5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integers_by_hand(bits):
    x = np.asarray(normal(3, 16), np.float64)
    x[0, 8:] = 0
    top = 2 ** (bits - 1) - 1
    scales = abs(x.reshape(3, 2, 8)).max(-1) / top
    steps = scales.repeat(8, axis=1)
    q = np.round(x / np.where(steps > 0, steps, 1))
    encoded = quantize_vectors(jnp.asarray(x, jnp.float32), IntCodec(bits, group=8))
    np.testing.assert_allclose(encoded.scales, scales, rtol=1e-6)
    np.testing.assert_allclose(dequantize_vectors(encoded), q * steps, atol=1e-6)
    assert abs(np.asarray(dequantize_vectors(encoded)) - x).max() <= steps.max() / 2
    if bits == 8:
        np.testing.assert_array_equal(encoded.codes, q + 128)


def test_float8_rounds_as_ml_dtypes_and_keeps_the_largest():
    x = normal(5, 32) * jnp.geomspace(1e-4, 1e3, 32)
    encoded = quantize_vectors(x, Float8Codec(group=16))
    groups = np.asarray(x).reshape(5, 2, 16)
    scales = abs(groups).max(-1) / np.float32(448)
    floats = (groups / scales[..., None]).astype(jnp.float8_e4m3fn)
    np.testing.assert_allclose(encoded.scales, scales, rtol=1e-6)
    np.testing.assert_array_equal(encoded.codes, floats.reshape(5, 32).view(np.uint8))
    y = dequantize_vectors(encoded)
    expected = floats.astype(np.float32) * scales[..., None]
    np.testing.assert_allclose(y, expected.reshape(5, 32), rtol=1e-6)
    np.testing.assert_array_equal(
        Float8Codec().levels(jnp.arange(256, dtype=jnp.uint8), jnp.float32),
        Float8Codec().table(),
    )


@pytest.mark.parametrize(
    "codec", [TurboQuantCodec(3), IntCodec(4), Float8Codec()], ids=str
)
def test_zeros_come_back_as_zeros(codec):
    @jax.jit
    def round_trip(x):
        return dequantize_vectors(quantize_vectors(x, codec))

    x = jnp.zeros((2, 16))
    np.testing.assert_array_equal(round_trip(x), x)
    for f in (jax.grad, jax.jacfwd):
        assert np.isfinite(jax.jit(f(lambda x: round_trip(x).sum()))(x)).all()
    tiny = jnp.full((2, 16), 1e-30)
    assert np.isfinite(round_trip(tiny)).all()


def test_nan_stays_in_its_vector():
    x = normal(3, 16).at[1, 2].set(jnp.nan)
    y = turboquant_decode(turboquant_encode(x))
    np.testing.assert_array_equal(np.isnan(y).all(-1), [False, True, False])
    np.testing.assert_array_equal(np.isnan(y).any(-1), [False, True, False])


def test_straight_through():
    x, codec = normal(2, 32), TurboQuantCodec(4)
    weights = normal(2, 32, seed=1)
    np.testing.assert_array_equal(
        quantize_straight_through(x, codec),
        dequantize_vectors(quantize_vectors(x, codec)),
    )
    dx = jax.grad(lambda x: jnp.vdot(weights, quantize_straight_through(x, codec)))(x)
    np.testing.assert_array_equal(dx, weights)


def test_dtypes():
    encoded = turboquant_encode(normal(2, 32).astype(jnp.bfloat16))
    assert encoded.scales.dtype == jnp.float32
    assert turboquant_decode(encoded).dtype == jnp.float32
    assert turboquant_decode(encoded, dtype=jnp.float16).dtype == jnp.float16


def test_pytree():
    x = normal(4, 3, 32)
    encoded = turboquant_encode(x)
    assert [v.shape for v in jax.tree.leaves(encoded)] == [(4, 3, 16), (4, 3, 1)]
    mapped = jax.vmap(turboquant_encode)(x)
    np.testing.assert_array_equal(mapped.codes, encoded.codes)
    _, scanned = jax.lax.scan(lambda _, v: (None, turboquant_decode(v)), None, encoded)
    np.testing.assert_allclose(scanned, turboquant_decode(encoded), atol=1e-6)
    np.testing.assert_array_equal(encoded[:, 1].codes, encoded.codes[:, 1])
    assert encoded[2].shape == (3, 32) and encoded.nbytes == 4 * 3 * (16 + 4)
    assert "shape=(4, 3, 32)" in repr(encoded)
    empty = QuantizedVectors.zeros((2, 32), TurboQuantCodec(4), jnp.float16)
    assert empty.scales.dtype == jnp.float16
    np.testing.assert_array_equal(turboquant_decode(empty), jnp.zeros((2, 32)))


def test_every_error_says_what_to_do():
    with pytest.raises(TypeError, match=r"quantize_vectors: .* power of two, got 24"):
        turboquant_encode(jnp.zeros((2, 24)))
    with pytest.raises(TypeError, match=r"4 dims do not fit .* fill whole bytes"):
        turboquant_encode(jnp.zeros((2, 4)), bits=1)
    with pytest.raises(TypeError, match=r"20 dims do not fit .* whole groups"):
        quantize_vectors(jnp.zeros((2, 20)), IntCodec(4, group=8))
    with pytest.raises(ValueError, match=r"`bits` must be 1 to 8 or 2.25, got 2.5"):
        TurboQuantCodec(2.5)
    with pytest.raises(ValueError, match=r"`bits` must be 2 to 8, got 1"):
        IntCodec(1)
    with pytest.raises(ValueError, match=r"`group` must be 1 or more, got 0"):
        IntCodec(4, group=0)
    with pytest.raises(ValueError, match=r"tuple of 2\*\*2 ascending numbers"):
        TurboQuantCodec(2, codebook=(0.0, 1.0, 1.0, 2.0))
    with pytest.raises(ValueError, match=r"table has 512 signs"):
        turboquant_encode(jnp.zeros((1, 1024)))
    with pytest.raises(TypeError, match=r"`x` must be QuantizedVectors, got ArrayImpl"):
        dequantize_vectors(jnp.zeros((1, 16)))
    encoded = turboquant_encode(normal(2, 16))
    with pytest.raises(TypeError, match=r"2 scales for 16 dims, .* has 1"):
        dequantize_vectors(
            QuantizedVectors(encoded.codes, jnp.zeros((2, 2)), encoded.codec)
        )
    with pytest.raises(TypeError, match=r"8 bytes are no whole vector"):
        QuantizedVectors(encoded.codes, encoded.scales, TurboQuantCodec(3)).shape  # noqa: B018
    with pytest.raises(TypeError, match=r"only the 1 leading dims"):
        encoded[0, 0]
