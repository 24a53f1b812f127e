"""4-bit floats against the casts of ml_dtypes; the three layouts of their bytes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import pack_fp4, unpack_fp4
from jaxkern.primitives.quant.fp4 import decode_e2m1, encode_e2m1


def test_values():
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    values = decode_e2m1(jnp.asarray(codes))
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nearest_with_ties_to_even_and_saturation(dtype):
    ties = np.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = np.asarray([0, 1, 1, 2, 2, 4, 4])
    signs = np.concatenate([even, -even])
    x = jnp.asarray(np.concatenate([ties, -ties]), dtype)
    np.testing.assert_array_equal(decode_e2m1(encode_e2m1(x)), signs)
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-8, 8, 5000), [0.0, -0.0, 100.0, -6.5]])
    x = np.asarray(jnp.asarray(x, dtype))
    inside = np.clip(np.float32(x), -6, 6)
    expected = inside.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(jax.jit(encode_e2m1)(x), expected)
    ends = encode_e2m1(jnp.asarray([np.inf, -np.inf, np.nan]))
    np.testing.assert_array_equal(ends & 7, [7, 7, 7])


def test_layouts_hold_a_code_where_their_systems_look_for_it():
    """Pairs along d, pairs along f over `[d, f]`, halves of a group of 4."""
    codes = np.random.default_rng(0).integers(0, 16, (3, 8)).astype(np.uint8)
    packed = {
        layout: np.asarray(pack_fp4(jnp.asarray(codes), layout, group_size=4))
        for layout in ("pairs_d", "pairs_f", "half_split")
    }

    def nibble(line, index):
        return line[index // 2] >> 4 * (index % 2) & 15

    for i, j in np.ndindex(3, 8):
        assert nibble(packed["pairs_d"][i], j) == codes[i, j]
        assert nibble(packed["pairs_f"], j * 3 + i) == codes[i, j]
        group, inner = divmod(j, 4)
        byte = packed["half_split"][i, group * 2 + inner % 2]
        assert byte >> 4 * (inner // 2) & 15 == codes[i, j]


@pytest.mark.parametrize("layout", ["pairs_d", "pairs_f", "half_split"])
@pytest.mark.parametrize("shape", [(3, 8), (2, 4), (0, 4)])
def test_unpacking_undoes_packing(layout, shape):
    codes = np.random.default_rng(0).integers(0, 16, shape).astype(np.uint8)
    packed = pack_fp4(jnp.asarray(codes), layout, group_size=4)
    back = unpack_fp4(packed, layout, shape, group_size=4)
    np.testing.assert_array_equal(back, codes)


def test_pairs_of_an_odd_number_of_codes():
    codes = np.random.default_rng(0).integers(0, 16, (3, 5)).astype(np.uint8)
    packed = pack_fp4(jnp.asarray(codes), "pairs_f")
    assert packed.shape == (8,)
    np.testing.assert_array_equal(unpack_fp4(packed, "pairs_f", (3, 5)), codes)


def test_errors_say_what_to_do():
    codes = jnp.zeros((2, 6), jnp.uint8)
    with pytest.raises(ValueError, match="pack_fp4: `layout` must be one of pairs_d"):
        pack_fp4(codes, "rows")
    with pytest.raises(ValueError, match="half_split needs a `group_size`"):
        pack_fp4(codes, "half_split", group_size=4)
    with pytest.raises(ValueError, match="pairs need an even last dim"):
        pack_fp4(codes[:, :3], "pairs_d")
    with pytest.raises(ValueError, match="unpack_fp4: pairs_d codes of"):
        unpack_fp4(codes, "pairs_d", (2, 6))
