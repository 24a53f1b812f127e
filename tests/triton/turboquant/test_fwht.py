"""The plan of the Walsh-Hadamard kernel: every bit of the index once, in registers."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard

from jaxkern.gpu import triton_call as bridge
from jaxkern.triton.turboquant import fwht

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("k", range(16))
def test_every_bit_is_a_butterfly_once_and_in_registers(k, dtype):
    d, dtype = 2**k, jnp.dtype(dtype)
    sizes = fwht.tile_sizes(d, dtype)
    tile, warps, product = sizes["TILE"], sizes["num_warps"], sizes.get("PRODUCT", 0)
    plan = (d, tile, dtype.itemsize, warps, product)
    phases = fwht.butterfly_bits(*plan)
    shared = (d // tile).bit_length() - 1 if product else 0  # by the signs of halves
    assert sorted(sum(phases, ())) == list(range(product, k - shared))
    for bits, layout in zip(phases, fwht.layouts(*plan), strict=True):
        registers = {base[0] for base in layout.reg_bases}
        parts = (layout.reg_bases, layout.lane_bases, layout.warp_bases)
        assert {1 << b for b in bits} <= registers
        assert sorted(b[0] for p in parts for b in p) == [
            1 << i for i in range(tile.bit_length() - 1)
        ]
        assert 32 * warps * 2 ** len(layout.reg_bases) == tile


def test_butterflies_make_the_hadamard_matrix():
    """The kernel's arithmetic on one tile, in NumPy."""
    d, tile = 16, 64
    x = np.random.default_rng(0).standard_normal(tile)
    y = x
    for bit in (2, 0, 3, 1):
        s = 1 << bit
        a, b = np.moveaxis(y.reshape(tile // (2 * s), 2, s), 1, 0)
        y = np.stack([a + b, a - b], -1).transpose(0, 2, 1).reshape(tile)
    expected = x.reshape(-1, d) @ hadamard(d)
    np.testing.assert_allclose(y.reshape(-1, d), expected, atol=1e-12)
