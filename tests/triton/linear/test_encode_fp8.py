"""Codes of 8 bits and their transpose, in Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.linear.encode_fp8 import encode_fp8_p
from jaxkern.triton.linear import encode_fp8 as kernel
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
SHAPES = [(1, 1, 1), (2, 3, 13), (1, 130, 64), (2, 65, 70)]  # one tile, and several
FORMS = ["e4m3fn", "e5m2"]


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, len(SHAPES) * len(FORMS) + 1)


@alone
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_their_transpose(shape, form):
    """Of numbers that the formats have: the interpreter rounds in another way."""
    draw = np.random.default_rng(0)
    x = draw.integers(-7, 8, shape) * 2.0 ** draw.integers(-2, 5, shape)
    if form == "e5m2":
        x = np.sign(x) * 2.0 ** draw.integers(-9, 9, shape)
    x, scale = jnp.asarray(x, jnp.float32), jnp.float32(0.5)
    with interpreted():
        found = kernel.encode_fp8(x, scale, form=form)
    for y, e in zip(found, encode_fp8_p(x, scale, form=form), strict=True):
        assert y.dtype == jnp.uint8
        np.testing.assert_array_equal(y, e)


@alone
def test_older_gpus_are_refused_in_words():
    x = jax.ShapeDtypeStruct((1, 2, 3), jnp.bfloat16)
    with compiling_for(80):
        reason = kernel.unsupported(x=x)
    assert reason in (
        "the GPU has compute capability 80, below 89",
        bridge.missing(),
    )
