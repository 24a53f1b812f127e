"""Triton kernels of rotations on a GPU: pairings, odd and partial heads."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import apply_rope
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "h, pairs, options",
    [
        (128, 64, {"pairing": "interleaved"}),
        (80, 16, {}),
        (80, 16, {"pairing": "interleaved"}),
        (96, 24, {"pair_offset": 48}),
        (2, 1, {"pairing": "interleaved"}),
    ],
)
def test_rotations(h, pairs, options, dtype):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((2, 37, 3, h)), dtype)
    angle = rng.standard_normal((37, pairs))
    cos, sin = jnp.float32(np.cos(angle)), jnp.float32(np.sin(angle))
    check_against_float64(lambda x: apply_rope(x, cos, sin, **options), x)
