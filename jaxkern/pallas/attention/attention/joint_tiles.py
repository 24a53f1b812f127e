"""What the threads of the kernel of five products share: operands, tiles and blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxkern.pallas.attention.attention.gradient_blocks import (
    back_and_forth,
    place_keys,
    query_blocks,
)
from jaxkern.pallas.attention.attention.problem import Problem

SLOTS = 3  # of dS: the one written, the one read and the one before


class Operands(NamedTuple):
    """Arrays in memory, results last; those that are absent are None."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse2: Any
    delta: Any
    counts: Any  # of units of dq, by row
    q_ids: Any
    kv_ids: Any
    bounds: Any
    lengths: Any
    offset: Any
    dq: Any
    dk: Any
    dv: Any


class Buffers:
    """Shared memory."""

    def __init__(self, k: Any, v: Any, q: Any, dout: Any, rows: Any, ds: Any, dq: Any):
        self.k, self.v, self.q, self.dout, self.ds, self.dq = k, v, q, dout, ds, dq
        self.lse2, self.delta, self.counts = rows


class Barriers(NamedTuple):
    held: Any  # keys and values
    full: Any  # a block of queries
    free: Any
    ds_ready: Any  # of both consumers
    keys_free: Any  # dk and dv may lie where keys and values lay
    dq_full: Any
    dq_free: Any


class Program:
    """KEYS keys of a key head and the blocks of queries that see them.

    Attributes:
      blocks: (first, whole, whole_end, last) as query_blocks has them.
      count: blocks of queries of one head.
      steps: of all heads of the group.
    """

    def __init__(self, index: Any, operands: tuple, c: Problem, interpret: bool):
        *arrays, in_shared, barriers = operands
        self.refs, self.buffers = Operands(*arrays), Buffers(*in_shared)
        self.barriers, self.c, self.interpret = Barriers(*barriers), c, interpret
        refs = self.refs
        self.batch, self.kv_head, self.block = place_keys(index, c)
        self.blocks = query_blocks(
            self.batch, self.block, refs.lengths, refs.offset, refs.bounds, c
        )
        self.first, _, _, self.last = self.blocks
        self.count = self.last - self.first
        self.steps = self.count * c.group

    def walk_all(self, f: Callable) -> None:
        """f(i, head, block of queries) for every step."""

        def head(member, i):
            def step(n, i):
                j = back_and_forth(n, self.kv_head, member, self.blocks, self.c)
                f(i, self.kv_head * self.c.group + member, j)
                return i + 1

            return lax.fori_loop(self.first, self.last, step, i)

        lax.fori_loop(0, self.c.group, head, jnp.int32(0))
