"""Codes of 8 bits and their transpose."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern.primitives.linear.encode_fp8 import encode_fp8_p
from jaxkern.testing.checks import Spec, bf16, case, f16, f32


def power():
    return Spec((), np.float32, lambda rng, s: 2.0 ** rng.integers(-3, 3, s))


CASES = [
    case("plain", x=f32(2, 3, 8), scale=power(), form="e4m3fn"),
    case("odd", x=bf16(1, 5, 7), scale=power(), form="e5m2"),
    case("half", x=f16(3, 2, 4), scale=power(), form="e5m2"),
    case("llama_1b", x=bf16(8, 2048, 2048), scale=power(), form="e4m3fn", full=True),
]


@pytest.mark.parametrize("form", ["e4m3fn", "e5m2"])
def test_codes_are_those_of_numpy(form):
    x = np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float32)
    codes, turned = encode_fp8_p(x, jnp.float32(0.25), form=form)
    expected = (x / 0.25).astype(getattr(ml_dtypes, f"float8_{form}")).view(np.uint8)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(turned, np.moveaxis(expected, 2, 0))
