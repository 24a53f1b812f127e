"""NVFP4, MXFP4, MXFP8 against MLX, ml_dtypes and ggml, and products in float64."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import (
    GGUFTensor,
    MicroscaledTensor,
    dequantize,
    grouped_matmul,
    pack_fp4,
    quantize_microscaled,
    quantized_embedding,
    quantized_matmul,
    unpack_fp4,
)
from jaxkern.primitives.quant.microscaled_tensor import MICROSCALED
from jaxkern.testing.checks import Spec, bf16, case, f32, i32, uniform

GOLDEN = Path(__file__).parents[2] / "golden" / "mlx_float_formats.npz"


def byte_values(*shape: int, low: int, high: int) -> Spec:
    return Spec(shape, np.uint8, lambda rng, s: rng.integers(low, high, s))


def two_a_byte(*shape: int) -> Spec:
    return byte_values(*shape, low=0, high=256)


def small_e4m3fn(*shape: int) -> Spec:
    return byte_values(*shape, low=0x20, high=0x48)


def small_e8m0(*shape: int) -> Spec:
    return byte_values(*shape, low=125, high=129)


NVFP4 = {"format": "nvfp4", "dtype": None}
CASES = {
    "quantize_microscaled": [
        case(
            "nvfp4",
            full=True,
            w=f32(8, 32),
            widen=uniform(8, low=100.0, high=400.0),
            format="nvfp4",
        ),
        case("mxfp8", full=True, w=f32(2, 4, 64), format="mxfp8"),
        case("mxfp4", full=True, w=bf16(3, 256), format="mxfp4"),
    ],
    "dequantize_microscaled": [
        case(
            "nvfp4",
            codes=two_a_byte(4, 16),
            scales=small_e4m3fn(4, 2),
            global_scale=uniform(4),
            **NVFP4,
        ),
        case(
            "mxfp8",
            codes=small_e4m3fn(2, 32),
            scales=small_e8m0(2, 1),
            format="mxfp8",
            dtype=None,
        ),
    ],
    "microscaled_matmul": [
        case(
            "nvfp4",
            x=f32(4, 32),
            codes=two_a_byte(8, 16),
            scales=small_e4m3fn(8, 2),
            global_scale=uniform(8),
            format="nvfp4",
            compute_dtype=None,
        ),
        case(
            "empty",
            x=f32(0, 32),
            codes=two_a_byte(3, 16),
            scales=small_e8m0(3, 1),
            format="mxfp4",
            compute_dtype=None,
        ),
        case(
            "gpt_oss_20b_down",
            x=bf16(2, 2880),
            codes=two_a_byte(2880, 1440),
            scales=small_e8m0(2880, 90),
            format="mxfp4",
            compute_dtype=None,
            full=True,
        ),
    ],
    "microscaled_matmul_id": [
        case(
            "mxfp4",
            x=f32(2, 32),
            ids=i32(2, 1, low=-1, high=4),
            codes=two_a_byte(3, 8, 16),
            scales=small_e8m0(3, 8, 1),
            format="mxfp4",
            compute_dtype=None,
        ),
        case(
            "nvfp4",
            x=f32(2, 32),
            ids=i32(2, 2, high=3),
            codes=two_a_byte(3, 4, 16),
            scales=small_e4m3fn(3, 4, 2),
            global_scale=uniform(3, 4),
            format="nvfp4",
            compute_dtype=None,
            full=True,
        ),
    ],
    "microscaled_embedding": [
        case(
            "nvfp4",
            ids=i32(3, low=-1, high=9),
            codes=two_a_byte(8, 8),
            scales=small_e4m3fn(8, 1),
            global_scale=uniform(8),
            **NVFP4,
        ),
    ],
}


def decoded(w: MicroscaledTensor) -> np.ndarray:
    """By the casts of ml_dtypes, in float64."""
    codes, scales = np.asarray(w.codes), np.asarray(w.scales)
    if w.format == "mxfp8":
        element = codes.view(ml_dtypes.float8_e4m3fn)
    else:
        pairs = np.stack([codes & 15, codes >> 4], axis=-1)
        element = pairs.reshape(*codes.shape[:-1], -1).view(ml_dtypes.float4_e2m1fn)
    kind = "float8_e4m3fn" if w.format == "nvfp4" else "float8_e8m0fnu"
    scale = scales.view(getattr(ml_dtypes, kind)).astype(np.float64)
    size = MICROSCALED[w.format].group_size
    values = element.astype(np.float64) * np.repeat(scale, size, axis=-1)
    if w.global_scale is not None:
        values = values * np.float64(w.global_scale)[..., None, None]
    return values


def weight(form: str, *shape: int) -> tuple[MicroscaledTensor, np.ndarray]:
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    q = quantize_microscaled(jnp.asarray(w), format=form)
    return q, decoded(q)


@pytest.mark.parametrize("key", ["nvfp4", "nvfp4_global", "mxfp4", "mxfp8"])
def test_bits_of_mlx(key):
    """But for ties of e2m1 and the sign of zeros, where MLX on a CPU is alone."""
    golden = np.load(GOLDEN)
    form, _, two_level = key.partition("_")
    w = golden["w"]
    q = jax.jit(quantize_microscaled, static_argnames=("format", "two_level"))(
        w, format=form, two_level=bool(two_level)
    )
    np.testing.assert_array_equal(q.scales, golden[f"{key}_scales"])
    theirs = golden[f"{key}_codes"]
    if form == "mxfp8":
        np.testing.assert_array_equal(q.codes, theirs)
    else:
        ours, theirs = (unpack_fp4(c, "pairs_d", w.shape) for c in (q.codes, theirs))
        size = MICROSCALED[form].group_size
        factor = q.global_scale if two_level else 1
        with np.errstate(all="ignore"):
            unit = np.repeat(decoded_scales(q), size, axis=-1) * np.float64(factor)
            at = np.abs(w / unit)
        is_tie = np.isin(at, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
        assert is_tie.mean() < 0.1
        np.testing.assert_array_equal((ours & 7)[~is_tie], (theirs & 7)[~is_tie])
        signed = ~is_tie & (np.asarray(ours & 7) > 0)
        np.testing.assert_array_equal(ours[signed], theirs[signed])
    held = MicroscaledTensor(
        jnp.asarray(golden[f"{key}_codes"]), q.scales, q.global_scale, form
    )
    np.testing.assert_array_equal(dequantize(held), golden[f"{key}_values"])


def decoded_scales(q: MicroscaledTensor) -> np.ndarray:
    kind = "float8_e4m3fn" if q.format == "nvfp4" else "float8_e8m0fnu"
    return np.asarray(q.scales).view(getattr(ml_dtypes, kind)).astype(np.float64)


@pytest.mark.parametrize("form", MICROSCALED)
def test_every_scale_and_code_decodes_to_its_value(form):
    """Scales below the normal numbers too: 2**-127 is one of e8m0's."""
    form_ = MICROSCALED[form]
    row = np.arange(form_.group_size * form_.bits // 8, dtype=np.uint8) * 11 + 3
    scales = np.arange(256, dtype=np.uint8)[:, None]
    w = MicroscaledTensor(
        jnp.asarray(np.tile(row, (256, 1))), jnp.asarray(scales), None, form
    )
    expected = decoded(w)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    actual = np.asarray(jax.jit(dequantize)(w))
    tiny = np.abs(expected) < 2.0**-126  # results a platform may flush
    np.testing.assert_array_equal(actual[~tiny], expected[~tiny])
    assert (np.abs(actual[tiny]) < 2.0**-126).all()


@pytest.mark.parametrize("form", MICROSCALED)
def test_product_and_gradient(form):
    q, values = weight(form, 6, 64)
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((3, 64)), rng.standard_normal((3, 6))
    with jax.enable_x64(True):
        f = jax.jit(lambda x: quantized_matmul(x, q))
        y, vjp = jax.vjp(f, jnp.asarray(x))
        (dx,) = vjp(jnp.asarray(dy))
    np.testing.assert_allclose(y, x @ values.T, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dx, dy @ values, rtol=1e-6, atol=1e-6)


def test_gradient_of_the_global_scale():
    q, values = weight("nvfp4", 4, 32)
    x = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)

    def f(factor):
        w = MicroscaledTensor(q.codes, q.scales, factor, "nvfp4")
        return quantized_matmul(jnp.asarray(x), w).sum()

    expected = (x @ values.T).sum() / np.float64(q.global_scale)
    np.testing.assert_allclose(jax.grad(f)(q.global_scale), expected, rtol=1e-4)


def test_pairs_along_f():
    """`dequant_matmul_nvfp4`: nibble p * n + j over [k, n], scales [k / 16, n]."""
    rng = np.random.default_rng(0)
    k, n = 32, 3
    line = rng.integers(0, 256, k * n // 2).astype(np.uint8)
    scales = rng.integers(0x20, 0x48, (k // 16, n)).astype(np.uint8)
    x, factor = rng.standard_normal((2, k)), 0.5
    element = np.stack([line & 15, line >> 4], -1).ravel().reshape(k, n)
    w = element.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    w = w * np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(float), 16, 0)
    codes = unpack_fp4(jnp.asarray(line), "pairs_f", (n, k))
    q = MicroscaledTensor(
        pack_fp4(codes, "pairs_d"), jnp.asarray(scales.T), jnp.float32(factor)
    )
    y = quantized_matmul(jnp.asarray(x, jnp.float32), q)
    np.testing.assert_allclose(y, x @ w * factor, rtol=1e-5)


@pytest.mark.parametrize("form, group", [("mxfp4", 32), ("nvfp4", 64)])
def test_blocks_of_ggml(form, group):
    """Half-split nibbles: the scales of a block, then its codes."""
    w = np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32)
    q = quantize_microscaled(jnp.asarray(w), format=form, two_level=False)
    codes = unpack_fp4(q.codes, "pairs_d", (2, 128))
    size = MICROSCALED[form].group_size
    halves = pack_fp4(codes, "half_split", group_size=size).reshape(2, -1, group // 2)
    scales = q.scales.reshape(2, -1, group // size)
    blocks = jnp.concatenate([scales, halves], axis=-1).reshape(2, -1)
    held = GGUFTensor(blocks, form.upper())
    np.testing.assert_array_equal(dequantize(held), dequantize(q))
    theirs = gguf.quants.dequantize(
        np.asarray(blocks), gguf.GGMLQuantizationType[form.upper()]
    )
    np.testing.assert_array_equal(dequantize(q), theirs)


@pytest.mark.parametrize("form", MICROSCALED)
def test_a_stack_of_experts_and_rows_of_a_table(form):
    q, values = weight(form, 3, 4, 32)
    assert q.shape == (3, 4, 32)
    if form == "nvfp4":
        assert q.global_scale.shape == (3,) and q[1].global_scale.shape == ()
    expected = values.astype(np.float32)
    np.testing.assert_allclose(dequantize(q), expected, rtol=3e-7)
    np.testing.assert_allclose(dequantize(q[1, 2:]), expected[1, 2:], rtol=3e-7)
    np.testing.assert_allclose(jax.vmap(dequantize)(q), expected, rtol=3e-7)
    rows = quantized_embedding(jnp.asarray([3, -1, 4]), q[2])
    np.testing.assert_allclose(rows[0], expected[2, 3], rtol=3e-7)
    assert not np.any(rows[1:])
    x = np.random.default_rng(1).standard_normal((5, 32)).astype(np.float32)
    y = jax.jit(grouped_matmul)(x, q, jnp.asarray([2, 0, 3]))
    expected = np.concatenate([x[:2] @ values[0].T, x[2:] @ values[2].T])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_what_has_no_place_is_the_nearest():
    """Zeros, a matrix of zeros, NaN and the powers of two that round up."""
    q = quantize_microscaled(jnp.zeros((2, 32)), format="nvfp4")
    assert not np.any(dequantize(q)) and q.global_scale == 1
    q = quantize_microscaled(jnp.zeros((1, 32)), format="mxfp4")
    assert q.scales[0, 0] == 127
    w = jnp.full((1, 32), 6.0).at[0, 0].set(6.000001)
    assert quantize_microscaled(w, format="mxfp4").scales[0, 0] == 128
    assert quantize_microscaled(w.at[0, 0].set(6), format="mxfp4").scales[0, 0] == 127
    for form in MICROSCALED:
        q = quantize_microscaled(w.at[0, 0].set(jnp.nan), format=form)
        assert np.isnan(np.asarray(dequantize(q))[0, 0])


def test_refusals():
    with pytest.raises(ValueError, match="`format` must be one of nvfp4, mxfp4, mxfp8"):
        quantize_microscaled(jnp.ones((2, 32)), format="fp4")
    with pytest.raises(TypeError, match="d a multiple of 32"):
        quantize_microscaled(jnp.ones((2, 16)), format="mxfp4")
    q, _ = weight("nvfp4", 4, 32)
    with pytest.raises(TypeError, match="2 groups of nvfp4 need 16 bytes a row"):
        dequantize(MicroscaledTensor(q.codes[:, :8], q.scales))
    with pytest.raises(TypeError, match="`global_scale` must have one number a matrix"):
        dequantize(MicroscaledTensor(q.codes, q.scales, jnp.ones(4)))
    with pytest.raises(TypeError, match=r"must be \[..., 32\]"):
        quantized_matmul(jnp.ones((2, 16)), q)
