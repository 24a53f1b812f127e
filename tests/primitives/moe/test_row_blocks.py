"""row_blocks: every row has one place, in a block of its group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.moe.row_blocks import block_size, row_blocks

jit_blocks = jax.jit(row_blocks, static_argnums=1)


@pytest.mark.parametrize("r, e", [(1, 1), (7, 3), (3, 20), (64, 2)])
def test_every_row_has_one_place_in_a_block_of_its_group(r, e):
    rng = np.random.default_rng(0)
    one = np.eye(e, dtype=np.int64)
    for sizes in (
        r * one[0],
        r * one[-1],
        np.bincount(rng.integers(0, e, r), minlength=e),
        np.bincount(rng.integers(0, e, r // 2), minlength=e),
        np.minimum(r, e) * one[e // 2],
        0 * one[0],
    ):
        blocks = jax.tree.map(np.asarray, jit_blocks(jnp.asarray(sizes), r))
        group = np.repeat(np.arange(e), sizes)
        held = int(sizes.sum())
        np.testing.assert_array_equal(blocks.grouped, np.arange(r) < held)
        assert sorted(blocks.row[blocks.filled].tolist()) == list(range(held))
        place = blocks.place[:held]
        np.testing.assert_array_equal(blocks.row.ravel()[place], np.arange(held))
        size = blocks.row.shape[1]
        np.testing.assert_array_equal(blocks.group[place // size], group)
        assert ((0 <= blocks.place) & (blocks.place < blocks.row.size)).all()


def test_groups_end_with_the_rows():
    blocks = row_blocks(jnp.asarray([2, 9]), 4)
    assert blocks.grouped.all() and blocks.filled.sum() == 4


@pytest.mark.parametrize("r, e, size", [(64, 128, 1), (100, 10, 8), (2**20, 64, 256)])
def test_block_size(r, e, size):
    assert block_size(r, e) == size
    (n, width) = jax.eval_shape(
        lambda s: row_blocks(s, r).row, jax.ShapeDtypeStruct((e,), jnp.int32)
    ).shape
    assert n * width <= 2 * r
