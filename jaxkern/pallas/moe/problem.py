"""Sizes of the grouped products on Hopper, and which tile a program takes."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

CONSUMERS = 2
ROWS = 64  # of one consumer
WIDTH = 64  # columns of a swizzled tile of 16-bit numbers
BLOCK_M = CONSUMERS * ROWS
BLOCK_K = 64  # of 16-bit numbers
PIECE_BYTES = 128  # of a row, that are written at once
ALIGN = 8  # the copy engine moves tiles of so many rows
BESIDE = 8  # tiles of one row block that are computed beside each other


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product of [.., m, k] and [.., k, n]; all static.

    Attributes:
      groups: their number.
      n: columns of the result.
      k: what is summed over; 0 where only the device knows.
      block_n: columns of a tile.
      block_k: of the sums of a step.
      stages: blocks of both operands that are held at once.
      buffers: pieces of results of a consumer that are written at once.
      programs: of the grid.
    """

    groups: int
    n: int
    k: int
    block_n: int
    block_k: int
    stages: int
    buffers: int
    programs: int

    @property
    def columns(self) -> int:
        """Tiles beside each other."""
        return -(-self.n // self.block_n)

    @property
    def steps(self) -> int:
        return -(-self.k // self.block_k)


def tiles_of(program: Any, total: Any, c: Problem) -> Any:
    """How many of `total` tiles a program takes: every `c.programs`-th."""
    return lax.div(total - program + (c.programs - 1), jnp.int32(c.programs))


def place(index: Any, rows: Any, columns: int) -> tuple[Any, Any]:
    """(row, column) of a tile: strips of BESIDE columns, down each of them.

    The programs that run at once then share their rows and their columns in the cache.
    """
    beside = min(BESIDE, columns)
    strip = lax.div(index, rows * beside)
    within = index - strip * rows * beside
    width = lax.min(jnp.int32(beside), columns - strip * beside)
    row = lax.div(within, width)
    return row, strip * beside + within - row * width


def slot_of(at: Any, c: Problem) -> Any:
    """Of the ring, for the block `at` of all that a program takes."""
    return lax.rem(at, jnp.int32(c.stages))
