"""What the threads of a program of the forward kernel share: operands and tiles."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.pallas.attention.attention.blocks import key_blocks, nth_tile, place
from jaxkern.pallas.attention.attention.problem import Problem


class Operands(NamedTuple):
    """Arrays in memory; those that are absent are None."""

    q: Any
    k: Any
    v: Any
    q_ids: Any
    kv_ids: Any
    bias: Any
    words: Any
    bounds: Any
    lengths: Any
    offset: Any
    sinks: Any
    out: Any
    lse: Any
    tail: Any


class Buffers(NamedTuple):
    """Shared memory; what has no room in it is None."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    bias: Any


class Barriers(NamedTuple):
    q_full: Any
    q_free: Any  # the queries are not needed any more
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    turn: Any  # whose turn it is, for the interpreter


class Tile(NamedTuple):
    """`columns`: what is taken of the values. The rest as `key_blocks` has it."""

    batch: Any
    head: Any
    columns: tuple[Any, ...]
    block: Any
    first: Any
    whole: Any
    whole_end: Any
    last: Any

    @property
    def count(self) -> Any:
        return self.last - self.first


class Program(NamedTuple):
    """The tiles that a program takes one after another."""

    index: Any
    refs: Operands
    c: Problem

    def tiles(self) -> Any:
        rounds = jnp.int32(self.c.tiles // self.c.programs)
        more = nth_tile(rounds, self.index, self.c) < self.c.tiles
        return rounds + more.astype(jnp.int32)

    def tile(self, i: Any) -> Tile:
        c, refs = self.c, self.refs
        in_turn = c.programs < c.tiles
        batch, head, block = place(nth_tile(i, self.index, c), c, in_turn)
        columns = ()
        if c.parts > 1:
            part = lax.rem(head, jnp.int32(c.parts))
            columns = (pl.ds(pl.multiple_of(part * c.hv, c.hv), c.hv),)
            head = lax.div(head, jnp.int32(c.parts))
        blocks = key_blocks(batch, block, refs.lengths, refs.offset, refs.bounds, c)
        return Tile(batch, head, columns, block, *blocks)


def slot_of(at: Any, c: Problem) -> Any:
    """Of the ring, for the block `at` of all that a program takes."""
    return lax.rem(at, jnp.int32(c.stages))
