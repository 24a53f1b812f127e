"""Kernels of qkv_rope in Triton's interpreter, against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.rope.qkv_rope import qkv_rope_p
from jaxkern.triton.rope import qkv_rope as kernel
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
CASES = {  # leading dims and tokens, heads, kv_heads, h, r, pair_offset, pairing
    "whole": ((2, 3), 6, 2, 8, 4, 4, "neox"),
    "llama": ((5,), 24, 4, 128, 64, 64, "neox"),
    "partial": ((2, 3), 5, 1, 11, 3, 5, "neox"),
    "neighbours": ((7,), 3, 1, 12, 6, 6, "interleaved"),
    "some neighbours": ((7,), 4, 1, 12, 4, 4, "interleaved"),
    "no keys": ((2, 2), 3, 0, 4, 2, 2, "neox"),
}


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, len(CASES))


@alone
@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name):
    lead, n, kv_heads, h, r, pair_offset, pairing = CASES[name]
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.float32(rng.standard_normal((*lead, *shape)))

    qkv, cos, sin = draw(n, h), draw(r), draw(r)
    options = dict(kv_heads=kv_heads, pairing=pairing, pair_offset=pair_offset)
    expected = qkv_rope_p.reference(qkv, cos, sin, **options)
    cotangents = [draw(*y.shape[-2:]) for y in expected]
    assert qkv_rope_p.bwd is not None
    gradient = qkv_rope_p.bwd.reference(cos, sin, *cotangents, **options)
    with interpreted():
        found = kernel.qkv_rope(qkv, cos, sin, **options)
        back = kernel.qkv_rope_bwd(cos, sin, *cotangents, **options)
    for y, e in zip((*found, back), (*expected, gradient), strict=True):
        assert y.shape == e.shape and y.dtype == e.dtype
        np.testing.assert_allclose(y, e, rtol=1e-6, atol=1e-6)
