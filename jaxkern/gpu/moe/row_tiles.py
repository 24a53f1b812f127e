"""Sorted rows cut into tiles of one group each, by offsets that only the device knows.

    group sizes 3, 0, 5, then one row of no group, in tiles of 4:   000 2222 2 .

A tile is (group, first row, and of its rows those that are the group's). Rows behind
the last group are tiles of group e, whose results are zero. The number of tiles depends
on the sizes; the table has room for the most there can be.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Integer

GROUP, ROW, START, STOP = range(4)  # columns of the table


def most_tiles(r: int, e: int, block: int, align: int = 1) -> int:
    """Each run that has rows takes a tile, and another for each `block` of them."""
    runs = min(e, r) + 1
    return (r + runs * (align - 2)) // block + runs


def group_rows(
    group_sizes: Integer[Array, " e"], r: int
) -> tuple[Int32[Array, " e"], Int32[Array, " e"]]:
    """(start, stop) of each group; one that reaches beyond the rows ends with them."""
    sizes = jnp.minimum(group_sizes, r).astype(jnp.int32)  # their sums do not wrap
    stop = jnp.minimum(jnp.cumsum(sizes), r)
    return jnp.concatenate([jnp.zeros_like(stop, shape=1), stop[:-1]]), stop


def row_tiles(
    group_sizes: Integer[Array, " e"], r: int, block: int, align: int = 1
) -> tuple[Int32[Array, "n 4"], Int32[Array, " 1"]]:
    """The table of tiles and how many there are.

    Args:
      block: rows of a tile.
      align: the first tile of a group begins at a multiple of it, so that it may hold
        rows of groups before; its results for them are not stored.
    """
    e = group_sizes.size
    start, stop = group_rows(group_sizes, r)
    last = stop[-1:]
    start, stop = jnp.append(start, last), jnp.append(stop, jnp.full_like(last, r))
    first = start // align * align
    count = jnp.where(stop > start, (stop - first + block - 1) // block, 0)
    ends = jnp.cumsum(count)
    tile = jnp.arange(most_tiles(r, e, block, align), dtype=jnp.int32)
    group = jnp.minimum((ends <= tile[:, None]).sum(1, dtype=jnp.int32), e)
    row = first[group] + (tile - (ends - count)[group]) * block
    inside = jnp.maximum(row, start[group]), jnp.minimum(row + block, stop[group])
    return jnp.stack([group, row, *inside], axis=1), ends[-1:]
