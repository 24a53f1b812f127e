"""Rows in 8 bits with a scale each, and swiglu of rows, in Triton's interpreter."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.linear.encode_rows_fp8 import (
    encode_rows_fp8_p,
    swiglu_rows_fp8_p,
)
from jaxkern.triton.linear import encode_rows_fp8 as kernel
from tests.primitives.linear.test_encode_rows_fp8 import GPT_OSS, PLAIN, of_all_sizes
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
SHAPES = [(1, 1), (3, 13), (2, 65, 70), (7, 512), (2, 2500)]


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, len(SHAPES) + 4)


def check_bits(x):
    with interpreted():
        codes, scales = kernel.encode_rows_fp8(x)
    expected = encode_rows_fp8_p(x)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scales, expected[1])


@alone
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_bit_for_bit(shape):
    check_bits(jnp.asarray(of_all_sizes(shape, np.float32)))


@alone
def test_rows_that_are_read_twice(monkeypatch):
    monkeypatch.setattr(kernel, "LONGEST", 32)
    monkeypatch.setattr(kernel, "CHUNK", 32)
    check_bits(jnp.asarray(of_all_sizes((5, 77), jnp.bfloat16)))


@alone
def test_what_is_not_finite_stays_in_its_row():
    x = of_all_sizes((5, 40), np.float32)
    x[1, 2], x[2, 3], x[3, 4], x[0, 5] = np.inf, np.nan, -np.inf, 3.4e38
    with interpreted():
        codes, scales = map(np.asarray, kernel.encode_rows_fp8(jnp.asarray(x)))
    expected = encode_rows_fp8_p(jnp.asarray(x))
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(codes[[0, 4]], np.asarray(expected[0])[[0, 4]])
    assert ((codes[1:4] & 0x7F) == 0x7F).all()


@alone
@pytest.mark.parametrize("options", [PLAIN, GPT_OSS], ids=["plain", "gpt_oss"])
def test_a_gated_block(options):
    gate = jnp.asarray(of_all_sizes((9, 70), np.float32)).clip(-20, 20)
    up = gate[::-1, ::-1]
    expected = swiglu_rows_fp8_p(gate, up, **options)
    with interpreted():
        apart = kernel.swiglu_rows_fp8(gate, up, **options)
        packed = kernel.swiglu_rows_fp8(
            jnp.concatenate([gate, up], -1), None, **options
        )
    for codes, scales in (apart, packed):
        np.testing.assert_array_equal(scales, expected[1])
        found, e = (
            np.asarray(c).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            for c in (codes, expected[0])
        )
        # an exponential of another library may fall to the other side of a tie
        assert (np.abs(found - e) <= np.maximum(np.abs(e) / 7.9, 2**-9)).all()
        assert (found != e).mean() < 0.01
