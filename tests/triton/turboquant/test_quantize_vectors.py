"""What the compiler must leave apart for codes to be the reference's, in PTX."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxkern import IntCodec, backend, explain, quantize_vectors
from jaxkern.gpu import triton_call
from jaxkern.gpu.device import compiling_for

needs_compiler = pytest.mark.skipif(
    triton_call.missing() is not None, reason="triton or jax's CUDA plugin is missing"
)


@needs_compiler
@pytest.mark.parametrize("capability", [80, 90])
def test_the_product_with_a_reciprocal_is_rounded_before_it_becomes_an_integer(
    capability,
):
    quantize = functools.partial(quantize_vectors, codec=IntCodec(4))
    x = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)
    with compiling_for(capability), backend("triton", strict=True):
        [row] = explain(quantize, x, platform="cuda").rows
        [launch] = row.launches
        lines = [line for line in launch.ptx.splitlines() if "0f4B400000" in line]
    assert lines
    assert all(re.search(r"\badd\.(rn\.)?f32", line) for line in lines), lines[0]
