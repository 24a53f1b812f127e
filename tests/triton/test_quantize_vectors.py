"""The kernel that quantises vectors of any size, in the interpreter."""

import functools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxkern import Float8Codec, IntCodec
from jaxkern.primitives.turboquant.quantize_vectors import quantize_vectors_reference
from jaxkern.primitives.turboquant.vector_codec import planes, unpack
from jaxkern.triton import triton_call as bridge
from jaxkern.triton.turboquant.quantize_vectors import quantize_vectors_fwd
from tests.triton.interpreted import interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CODECS = [
    *(IntCodec(bits) for bits in range(2, 9)),
    IntCodec(7, group=8),
    Float8Codec(),
    Float8Codec(group=8),
]


@pytest.mark.full
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
def test_in_a_process_of_its_own():
    """Kernels must not have been decorated when the interpreter is asked for."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("d", [24, 48, 80, 208])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_and_scales_are_those_of_the_reference(codec, d):
    f = functools.partial(quantize_vectors_fwd, codec=codec)
    x = jax.random.normal(jax.random.key(d), (5, 7, d)).at[1, 2].set(0)
    with interpreted():
        codes, scales = f(x)
    expected, expected_scales = quantize_vectors_reference(x, codec=codec)
    np.testing.assert_allclose(scales, expected_scales, rtol=2e-7)
    found, expected = (unpack(y, planes(codec, d), d) for y in (codes, expected))
    np.testing.assert_array_equal(found, expected)
