"""NF4: levels, rounding, quantised scales, checkpoints of bitsandbytes, products."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    NF4Tensor,
    dequantize,
    fake_quant,
    linear,
    nf4_from_bitsandbytes,
    quantize_int,
    quantize_nf4,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_id,
    requantize,
)
from jaxkern.primitives.quant.nf4_tensor import LEVELS, dynamic_levels
from jaxkern.testing.checks import case, f32, i32, u8, uniform

SINGLE = {"codes": u8(4, 8), "scales": uniform(4, 2), "group_size": 8}
DOUBLE = {
    "codes": u8(3, 8),
    "scale_codes": u8(3, 2),
    "scales": uniform(3, 1),
    "offsets": uniform(3, 1, low=1, high=2),
    "group_size": 8,
}
CASES = {
    "dequantize_nf4": [
        case("double", dtype=None, **DOUBLE),
        case("single", dtype=None, **SINGLE),
    ],
    "nf4_matmul": [
        case("single", x=f32(4, 16), compute_dtype=None, **SINGLE),
        case("double", x=f32(2, 16), compute_dtype=None, **DOUBLE),
    ],
    "nf4_embedding": [
        case("double", ids=i32(4, low=-1, high=4), dtype=None, **DOUBLE),
        case("single", ids=i32(4, low=-1, high=5), dtype=None, **SINGLE),
    ],
    "nf4_matmul_id": [
        case(
            "single",
            x=f32(2, 8),
            ids=i32(2, 1, low=-1, high=4),
            codes=u8(3, 2, 4),
            scales=uniform(3, 2, 1),
            group_size=8,
            compute_dtype=None,
        ),
        case(
            "double",
            x=f32(2, 16),
            ids=i32(2, 1, low=-1, high=4),
            codes=u8(3, 2, 8),
            scale_codes=u8(3, 2, 2),
            scales=uniform(3, 2, 1),
            offsets=uniform(3, 2, 1, low=1, high=2),
            group_size=8,
            compute_dtype=None,
        ),
    ],
}


def draw(*shape, seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def decoded(w: NF4Tensor) -> np.ndarray:
    """The formula, weight by weight in float64."""
    codes = np.asarray(w.codes)
    code = np.stack([codes >> 4, codes & 15], axis=-1).reshape(*codes.shape[:-1], -1)
    absmax = np.asarray(w.scales, np.float64)
    if w.scale_codes is not None:
        groups = w.scale_codes.shape[-1]
        outer, offset = (
            np.repeat(np.asarray(a, np.float64), 256, axis=-1)[..., :groups]
            for a in (w.scales, w.offsets)
        )
        level = dynamic_levels().astype(np.float64)[np.asarray(w.scale_codes)]
        absmax = level * outer + offset
    level = np.array(LEVELS, np.float32).astype(np.float64)[code]
    return level * np.repeat(absmax, w.group_size, axis=-1)


def test_levels_are_quantiles_of_a_normal_distribution():
    """Eight above zero and seven below, between a half and the share that is kept."""
    quantile = statistics.NormalDist().inv_cdf
    kept = 0.9677083  # the mean of 1 - 1/30 and 1 - 1/32
    above = [quantile(p) for p in np.linspace(kept, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(kept, 0.5, 8)[:-1]]
    expected = np.sort([*above, 0, *below]) / max(above)
    np.testing.assert_allclose(LEVELS, expected, atol=2e-7)


def test_dynamic_levels():
    levels = dynamic_levels()
    assert levels.shape == (256,) and (np.diff(levels) > 0).all()
    assert levels[-1] == 1 and levels[127] == 0
    np.testing.assert_allclose(levels[0], -0.99296875, rtol=1e-6)
    np.testing.assert_allclose(levels[128], 5.5e-7, rtol=1e-6)
    np.testing.assert_array_equal(levels[:127], -levels[128:255][::-1])


@pytest.mark.parametrize("group_size", [16, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_weight_gets_its_nearest_level(dtype, group_size):
    w = draw(3, 5, 128).astype(dtype).at[1, 2, :group_size].set(0)
    q = quantize_nf4(w, group_size=group_size)
    assert q.shape == w.shape and q.scales.dtype == jnp.float32
    values = np.asarray(w, np.float64).reshape(3, 5, -1, group_size)
    absmax = np.abs(values).max(-1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(q.scales), absmax[..., 0])
    levels = np.array(LEVELS) * absmax[..., None]
    best = np.abs(values[..., None] - levels).min(-1)
    error = np.abs(decoded(q).reshape(values.shape) - values)
    np.testing.assert_allclose(error, best, atol=1e-7 * absmax.max())


@pytest.mark.parametrize("d", [64, 256 * 32, 300 * 32])
def test_quantised_scales(d):
    """One block of scales, a whole one, and one with a short second."""
    w = draw(2, d)
    exact = quantize_nf4(w, group_size=32)
    double = quantize_nf4(w, group_size=32, quantized_scales=True)
    np.testing.assert_array_equal(double.codes, exact.codes)
    assert double.scales.shape == (2, -(-d // 32 // 256))
    absmax = np.asarray(exact.scales, np.float64)
    for block in range(double.scales.shape[1]):
        part = absmax[:, block * 256 : (block + 1) * 256]
        np.testing.assert_allclose(double.offsets[:, block], part.mean(-1), rtol=1e-6)
    got = np.abs(decoded(double) / np.where(decoded(exact) == 0, 1, decoded(exact)) - 1)
    assert got[decoded(exact) != 0].max() < 0.02


@pytest.mark.parametrize("quantized_scales", [False, True])
def test_every_op_reads_the_container(quantized_scales):
    w = quantize_nf4(draw(6, 192), quantized_scales=quantized_scales)
    values = decoded(w)
    np.testing.assert_allclose(dequantize(w), values, rtol=1e-6)
    x = draw(3, 192, seed=1)
    expected = np.asarray(x, np.float64) @ values.T
    for y in (quantized_matmul(x, w), linear(x, w)):
        np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())
    ids = jnp.array([5, 0, -1])
    rows = np.asarray(quantized_embedding(ids, w))
    np.testing.assert_allclose(rows[:2], values[[5, 0]], rtol=1e-6)
    assert not rows[2].any()


def test_experts():
    w = quantize_nf4(draw(3, 4, 64))
    x, ids = draw(2, 64, seed=1), jnp.array([2, 0])
    expected = np.einsum("td,tfd->tf", np.asarray(x, np.float64), decoded(w)[[2, 0]])
    np.testing.assert_allclose(quantized_matmul_id(x, w, ids), expected, atol=1e-4)


def test_gradients_reach_x_and_scales():
    w, x = quantize_nf4(draw(4, 64), quantized_scales=True), draw(3, 64, seed=1)

    def total(x, scales):
        given = NF4Tensor(w.codes, scales, w.scale_codes, w.offsets, w.group_size)
        return quantized_matmul(x, given).sum()

    dx, dscales = jax.grad(total, (0, 1))(x, w.scales)
    np.testing.assert_allclose(dx, np.tile(decoded(w).sum(0), (3, 1)), rtol=1e-4)
    step = 1e-2 * w.scales
    slope = (total(x, w.scales + step) - total(x, w.scales - step)) / 2
    np.testing.assert_allclose(slope, (dscales * step).sum(), rtol=1e-2)


def test_a_checkpoint_of_bitsandbytes():
    f, d = 6, 128
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 256, (f * d // 2, 1), dtype=np.uint8)
    absmax = rng.random(f * 2).astype(np.float32)
    w = nf4_from_bitsandbytes(jnp.asarray(weight), jnp.asarray(absmax), (f, d))
    line = np.array(LEVELS)[np.stack([weight >> 4, weight & 15], axis=-1)].reshape(-1)
    expected = (line * np.repeat(absmax, 64)).reshape(f, d)
    np.testing.assert_allclose(dequantize(w), expected, rtol=1e-6)


@pytest.mark.parametrize("f, d", [(8, 64 * 64), (3, 64 * 512), (40, 64 * 24)])
def test_a_checkpoint_with_nested_scales(f, d):
    """Blocks of 256 scales with whole rows in them, within a row, and neither."""
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 256, f * d // 2, dtype=np.uint8)
    absmax = rng.integers(0, 256, f * d // 64, dtype=np.uint8)
    nested = rng.random(-(-absmax.size // 256)).astype(np.float32)
    w = nf4_from_bitsandbytes(
        jnp.asarray(weight),
        jnp.asarray(absmax),
        (f, d),
        nested_absmax=jnp.asarray(nested),
        nested_offset=0.25,
    )
    assert (w.scale_codes is None) == (d == 64 * 24)
    scale = dynamic_levels().astype(np.float64)[absmax]
    scale = scale * np.repeat(nested, 256)[: absmax.size] + 0.25
    line = np.array(LEVELS)[np.stack([weight >> 4, weight & 15], axis=-1)].reshape(-1)
    expected = (line * np.repeat(scale, 64)).reshape(f, d)
    np.testing.assert_allclose(dequantize(w), expected, rtol=1e-5, atol=1e-7)


def test_requantize_and_fake_quant():
    w = draw(3, 128)
    expected = dequantize(quantize_nf4(w, group_size=32))
    again = requantize(quantize_int(w), "nf4", group_size=32)
    assert isinstance(again, NF4Tensor) and again.shape == w.shape
    y, pull = jax.vjp(lambda w: fake_quant(w, "nf4", group_size=32), w)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(pull(w)[0], w)  # straight through


def test_container():
    w = quantize_nf4(jnp.ones((2, 3, 128)), quantized_scales=True)
    assert (w.ndim, w.nbytes) == (3, 6 * (64 + 2 + 4 + 4))
    assert w[1].shape == (3, 128) and w[1, 2].shape == (128,)
    assert repr(w) == "NF4Tensor(nf4 / 64, quantised scales, shape=(2, 3, 128))"
    np.testing.assert_allclose(jax.vmap(dequantize)(w), 1, rtol=1e-6)


def test_refusals():
    w = quantize_nf4(jnp.ones((4, 64)))
    with pytest.raises(TypeError, match="`group_size` must be even and divide d = 96"):
        quantize_nf4(jnp.ones((4, 96)))
    with pytest.raises(TypeError, match="dim `d` is 8 in `x` but 64 in `w`"):
        quantized_matmul(jnp.ones(8), w)
    with pytest.raises(TypeError, match="2 groups of 32 and 2 scales, got 1 and 1"):
        dequantize(NF4Tensor(w.codes, w.scales, group_size=32))
    with pytest.raises(TypeError, match="must share their leading dims"):
        dequantize(NF4Tensor(w.codes, w.scales[:2]))
    with pytest.raises(TypeError, match="`scale_codes` and `offsets` come together"):
        dequantize(NF4Tensor(w.codes, w.scales, scale_codes=w.codes[:, :1]))
    with pytest.raises(TypeError, match="`weight` must be uint8 of 128 bytes"):
        nf4_from_bitsandbytes(w.codes[:3], w.scales, (4, 64))
    with pytest.raises(TypeError, match="`absmax` must have 4 numbers, uint8 with"):
        nf4_from_bitsandbytes(w.codes, w.codes[:, :1], (4, 64))
