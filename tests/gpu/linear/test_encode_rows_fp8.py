"""Rows in 8 bits with a scale each on a GPU: the bits that XLA gives there."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import backend, explain
from jaxkern.primitives.linear.encode_rows_fp8 import (
    encode_rows_fp8_p,
    swiglu_rows_fp8_p,
)
from tests.gpu.truth import on_a_gpu, poison
from tests.primitives.linear.test_encode_rows_fp8 import (
    GPT_OSS,
    PLAIN,
    encoded,
    gated,
    of_all_sizes,
)

pytestmark = on_a_gpu
SHAPES = [
    *((1, 1), (3, 13), (2, 65, 70), (1000, 512), (37, 768), (130, 2048), (5, 2880)),
    *((9, 4096), (3, 5120), (2, 16384), (2, 16385), (3, 40001)),
]
NUMBER = 0x7F  # bits of a code without its sign; of NaN all are set


def by(name, f, *operands):
    def chosen(*operands):
        with backend(name, strict=name != "xla"):
            return f(*operands)

    return map(np.asarray, jax.jit(chosen)(*operands))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_bit_for_bit(shape, dtype):
    x = of_all_sizes(shape, jnp.dtype(dtype))
    given = jnp.asarray(x)
    poison(given)
    codes, scales = by("triton", encode_rows_fp8_p, given)
    plain = by("xla", encode_rows_fp8_p, given)
    for found, by_xla, by_numpy in zip((codes, scales), plain, encoded(x), strict=True):
        np.testing.assert_array_equal(found, by_xla)
        np.testing.assert_array_equal(found, by_numpy)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("d", [1, 40, 1000, 20000])
def test_edges_of_the_dtype_and_what_is_not_finite(d, dtype):
    info = ml_dtypes.finfo(dtype)
    x = of_all_sizes((10, d), jnp.dtype(dtype))
    edges = (np.inf, np.nan, -np.inf, -np.nan, info.max, info.tiny, -0.0)
    x[np.arange(len(edges)), d // 2] = edges
    x[5] = info.smallest_subnormal
    given = jnp.asarray(x)
    codes, scales = by("triton", encode_rows_fp8_p, given)
    codes_of_xla, scales_of_xla = by("xla", encode_rows_fp8_p, given)
    np.testing.assert_array_equal(scales, scales_of_xla)
    lost = (codes & NUMBER) == NUMBER
    np.testing.assert_array_equal(lost[:4], True)
    assert not lost[4:].any()
    np.testing.assert_array_equal(codes[4:], codes_of_xla[4:])
    np.testing.assert_array_equal(codes[:4] & NUMBER, codes_of_xla[:4] & NUMBER)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [PLAIN, GPT_OSS], ids=["plain", "gpt_oss"])
@pytest.mark.parametrize("shape", [(3, 13), (1000, 768), (5, 2880), (3, 20001)])
def test_a_gated_block_is_rounded_once(shape, options, packed):
    gate = 4 * of_all_sizes(shape, jnp.dtype("bfloat16"))
    up = gate[::-1, ::-1].copy()
    operands = jnp.asarray(gate), jnp.asarray(up)
    if packed:
        operands = jnp.concatenate(operands, -1), None
    poison(operands[0])
    f = functools.partial(swiglu_rows_fp8_p, **options)
    codes, scales = by("triton", f, *operands)
    y = gated(gate, up, **options)
    amax = np.abs(y).max(-1)
    at_a_step = np.abs(np.log2(amax / 448 + 1e-300) % 1 - 0.5) > 0.49999
    scale = encoded(y)[1]
    assert ((scales == scale) | at_a_step).all()
    steps = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    off = np.abs(steps - y / scales[:, None].astype(np.float64))
    assert (off <= np.maximum(np.abs(steps) / 15.9, 2**-9.9)).all()


def test_explain_names_the_kernel():
    text = str(explain(encode_rows_fp8_p, jnp.zeros((8, 128), jnp.bfloat16)))
    assert "triton: triton.linear.encode_rows_fp8" in text
