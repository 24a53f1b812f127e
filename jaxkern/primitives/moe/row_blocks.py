"""Sorted rows cut into blocks of one group each, in static shapes and without loss.

Each group begins at a whole block, so every block needs one weight:

    group sizes 3, 0, 5 in blocks of 4:   0 0 0 .   2 2 2 2   2 . . .   . . . .

`r` rows in `e` groups need at most `(r - n) // size + n` blocks, n = min(e, r): each
group that has a row takes one, and each further one takes `size` rows.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Integer


class RowBlocks(NamedTuple):
    """Where the blocks' places come from, and where each row went.

    Attributes:
      group: `[n]`, the group of each block.
      row: `[n, size]`, the row at each place; any row where `filled` is False.
      filled: `[n, size]`.
      place: `[r]`, where in `[n * size]` each row is; any place where not `grouped`.
      grouped: `[r]`, False for the rows behind the last group.
      group_of_row: `[r]`, any group where not `grouped`.
    """

    group: Int32[Array, " n"]
    row: Int32[Array, "n size"]
    filled: Bool[Array, "n size"]
    place: Int32[Array, " r"]
    grouped: Bool[Array, " r"]
    group_of_row: Int32[Array, " r"]


def row_blocks(group_sizes: Integer[Array, " e"], r: int) -> RowBlocks:
    """Blocks of `r` rows, the first `group_sizes[0]` of which are group 0's, and so on.

    A group that reaches beyond the rows ends with them. Neither r nor e may be 0.
    """
    e = group_sizes.size
    size = block_size(r, e)
    nonempty = min(e, r)
    block = jnp.arange((r - nonempty) // size + nonempty, dtype=jnp.int32)
    sizes = jnp.minimum(group_sizes, r).astype(jnp.int32)  # their sums do not wrap
    end = jnp.minimum(jnp.cumsum(sizes), r)
    start = jnp.concatenate([jnp.zeros_like(end, shape=1), end[:-1]])
    blocks_end = jnp.cumsum((end - start + size - 1) // size)
    blocks_start = jnp.concatenate([jnp.zeros_like(end, shape=1), blocks_end[:-1]])

    def group_at(ends, i):  # a group without rows is passed over
        return jnp.minimum((ends <= i[:, None]).sum(1, dtype=jnp.int32), e - 1)

    group = group_at(blocks_end, block)
    offset = (block - blocks_start[group])[:, None] * size + jnp.arange(size)
    row = start[group][:, None] + offset
    index = jnp.arange(r, dtype=jnp.int32)
    group_of_row = group_at(end, index)
    place = blocks_start[group_of_row] * size + index - start[group_of_row]
    return RowBlocks(
        group,
        jnp.minimum(row, r - 1),
        row < end[group][:, None],
        jnp.minimum(place, block.size * size - 1),
        index < end[-1],
        group_of_row,
    )


def block_size(r: int, e: int) -> int:
    """A power of two, at most 256 and the mean group: so at most `2 * r` places."""
    return min(256, 1 << max(r // e, 1).bit_length() - 1)
