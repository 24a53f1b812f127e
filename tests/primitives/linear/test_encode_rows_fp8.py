"""Rows in 8 bits with a scale each, and swiglu of rows, against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern.primitives.linear.encode_rows_fp8 import (
    encode_rows_fp8_p,
    swiglu_rows_fp8_p,
)
from jaxkern.testing.checks import bf16, case, f16, f32

PLAIN = dict(alpha=1.0, limit=None, up_offset=0.0)
GPT_OSS = dict(alpha=1.702, limit=7.0, up_offset=1.0)
CASES = {
    "encode_rows_fp8": [
        case("plain", x=f32(2, 3, 8)),
        case("odd", x=bf16(5, 7)),
        case("half", x=f16(3, 2), full=True),
        case("empty", x=f32(0, 4), full=True),
        case("qwen3_30b", x=bf16(4096, 2048), full=True),
    ],
    "swiglu_rows_fp8": [
        case("plain", gate=f32(3, 8), up=f32(3, 8), **PLAIN),
        case("packed", gate=bf16(2, 2, 6), **GPT_OSS),
        case("qwen3_30b", gate=bf16(4096, 768), up=bf16(4096, 768), **PLAIN, full=True),
    ],
}


def encoded(x):
    """(codes, scales) by NumPy, of finite rows."""
    x = np.asarray(x, np.float64)
    amax = np.abs(x).max(-1)
    scale = 2.0 ** np.maximum(
        np.ceil(np.log2(np.where(amax > 0, amax, 448) / 448)), -110
    )
    codes = (x / scale[..., None]).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), scale.astype(np.float32)


def gated(gate, up, alpha, limit, up_offset):
    gate, up = (np.asarray(a, np.float64) for a in (gate, up))
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / 2 * (1 + np.tanh(alpha * gate / 2)) * (up + up_offset)


def of_all_sizes(shape, dtype):
    """Rows of unlike sizes, elements below the normal ones, a row of zeros."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, (*shape[:-1], 1))
    x = x.astype(dtype)
    x[..., ::3] *= np.array(2**-8, dtype)
    x.reshape(-1, shape[-1])[-1] = 0
    return x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_and_scales_are_those_of_numpy(dtype):
    x = of_all_sizes((4, 5, 40), jnp.dtype(dtype))
    x[0, 0, 3] = 448 * 2.0**-3  # the last that the scale holds, and one beyond
    x[0, 0] = np.clip(x[0, 0], -56, 56)
    x[0, 1] = np.clip(x[0, 1], -56, 56)
    x[0, 1, 3] = 56.5
    codes, scales = jax.jit(encode_rows_fp8_p)(jnp.asarray(x))
    expected = encoded(x)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scales, expected[1])
    assert scales[0, 0] == 2**-3 and scales[0, 1] == 2**-2 and scales[-1, -1] == 1


@pytest.mark.parametrize("options", [PLAIN, GPT_OSS])
def test_a_gated_block_is_rounded_once(options):
    gate = 4 * of_all_sizes((6, 40), np.float32)
    up = gate[::-1, ::-1].copy()
    codes, scales = swiglu_rows_fp8_p(jnp.asarray(gate), jnp.asarray(up), **options)
    both = jnp.concatenate([gate, up], -1)
    packed = swiglu_rows_fp8_p(both, None, **options)
    y = gated(gate, up, **options)
    for c, s in ((codes, scales), packed):
        np.testing.assert_array_equal(s, encoded(y)[1])
        steps = np.asarray(c).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        off = np.abs(steps - y / np.asarray(s, np.float64)[:, None])
        assert (off <= np.maximum(np.abs(steps) / 15.9, 2**-9.9)).all()


def test_what_is_not_finite_stays_in_its_row():
    x = of_all_sizes((4, 9), np.float32)
    x[1, 2], x[2, 3] = np.inf, np.nan
    codes, scales = encode_rows_fp8_p(jnp.asarray(x))
    assert np.isnan(scales[1:3]).all() and np.isfinite(np.asarray(scales)[[0, 3]]).all()
    lost = (np.asarray(codes) & 0x7F) == 0x7F
    np.testing.assert_array_equal(lost.all(1), [False, True, True, False])
    assert not lost[[0, 3]].any()


def test_what_does_not_fit_is_refused():
    gate, up = jnp.ones((2, 8)), jnp.ones((2, 4))
    with pytest.raises(TypeError, match="`gate` and `up` must have one shape"):
        swiglu_rows_fp8_p(gate, up, **PLAIN)
    with pytest.raises(TypeError, match="swiglu_rows_fp8: packed `gate`"):
        swiglu_rows_fp8_p(jnp.ones((2, 7)), None, **PLAIN)
