"""What the threads of a program of the queries kernel share: operands and tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.pallas.attention.attention.blocks import key_blocks, nth_tile, place
from jaxkern.pallas.attention.attention.gradient_blocks import CONSUMERS, in_order
from jaxkern.pallas.attention.attention.problem import ROWS, Problem


class Operands(NamedTuple):
    """Arrays in memory, results last; those that are absent are None."""

    out: Any
    tail: Any
    q: Any
    k: Any
    v: Any
    dout: Any
    lse2: Any
    delta: Any
    q_ids: Any
    kv_ids: Any
    bias: Any
    words: Any
    bounds: Any
    lengths: Any
    offset: Any
    dq: Any
    slopes: Any
    delta_out: Any


class Buffers(NamedTuple):
    """Shared memory; what has no room in it is None."""

    q: Any
    dout: Any
    out: Any
    k: Any
    v: Any
    bias: Any
    dq: Any
    slopes: Any


class Barriers(NamedTuple):
    """Without `v_full` and `v_free` values come and go with their keys."""

    ready: Any  # the queries and what belongs to them
    q_free: Any
    pause: Any  # of a consumer with itself
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any

    @property
    def free(self) -> list[Any]:
        return [self.k_free] if self.v_free is None else [self.k_free, self.v_free]


class Program(NamedTuple):
    """The tiles that a program takes one after another."""

    index: Any
    refs: Operands
    c: Problem

    @property
    def several(self) -> bool:
        return self.c.programs < self.c.tiles

    def place_of(self, i: Any) -> Any:
        """(batch, head, block) of the i-th tile of the program."""
        return place(nth_tile(i, self.index, self.c), self.c, self.several)

    def blocks_of(self, batch: Any, block: Any, consumer: Any = None) -> Any:
        """Of the keys that the queries of a block, or of a consumer, see."""
        refs = self.refs
        at = batch, block, refs.lengths, refs.offset, refs.bounds
        return in_order(*key_blocks(*at, self.c, consumer))

    def walk(self, tile: Callable) -> Any:
        """tile(i, number of blocks before it) for each; returns the next number."""
        if not self.several:
            return tile(0, jnp.int32(0))
        rounds = jnp.int32(self.c.tiles // self.c.programs)
        more = nth_tile(rounds, self.index, self.c) < self.c.tiles
        return lax.fori_loop(0, rounds + more.astype(jnp.int32), tile, jnp.int32(0))


def slot_of(ring: Any, j: Any) -> Any:
    """Of a ring, for the block `j` of all that a program takes."""
    return lax.rem(j, jnp.int32(ring.shape[0]))


def rows_of(block: Any, consumer: Any) -> Any:
    """The queries of a consumer."""
    return pl.ds((block * CONSUMERS + consumer) * ROWS, ROWS)
