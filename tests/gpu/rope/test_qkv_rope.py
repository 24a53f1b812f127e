"""Triton kernels of qkv_rope on a GPU: pairings, odd and partial heads, both ways."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import qkv_rope
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "heads, kv_heads, h, pairs, options",
    [
        (48, 16, 128, 64, {}),
        (40, 4, 128, 64, {"pairing": "interleaved"}),
        (5, 1, 80, 16, {}),
        (5, 1, 80, 16, {"pairing": "interleaved"}),
        (9, 2, 96, 24, {"pair_offset": 48}),
    ],
)
def test_there_and_back(heads, kv_heads, h, pairs, options, dtype):
    rng = np.random.default_rng(2)
    qkv = jnp.asarray(rng.standard_normal((2, 37, heads, h)), dtype)
    angle = rng.standard_normal((37, pairs))
    cos, sin = jnp.float32(np.cos(angle)), jnp.float32(np.sin(angle))
    check_against_float64(
        lambda x: qkv_rope(x, cos, sin, kv_heads=kv_heads, **options), qkv
    )
