"""What the threads of a program that holds keys share: operands, tiles and blocks."""

from typing import Any, NamedTuple

from jaxkern.pallas.attention.attention.gradient_blocks import KEYS, query_blocks
from jaxkern.pallas.attention.attention.keys_share import Share
from jaxkern.pallas.attention.attention.problem import Problem


class Operands(NamedTuple):
    """Arrays in memory, results last; those that are absent are None."""

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
    dk: Any
    dv: Any


class Buffers(NamedTuple):
    """Shared memory; what has no room in it is None."""

    k: Any
    v: Any
    q: Any
    dout: Any
    lse2: Any
    delta: Any
    bias: Any
    sums: Any  # of one consumer for the other, where a program is a half


class Barriers(NamedTuple):
    ready: Any  # the keys and values of a consumer
    full: Any
    free: Any
    written: Any  # a sum for the other consumer
    read: Any


class Program:
    """The keys of a program and the blocks of queries that see them.

    Attributes:
      stages: blocks of queries that are in shared memory at once.
      block_q: queries of a block.
      blocks: (first, whole, whole_end, last) as query_blocks has them.
      count: blocks of queries of one head.
    """

    def __init__(
        self, index: Any, whole: int, operands: tuple, c: Problem, interpret: bool
    ):
        *arrays, in_shared, barriers = operands
        self.refs, self.buffers = Operands(*arrays), Buffers(*in_shared)
        self.barriers, self.c, self.interpret = Barriers(*barriers), c, interpret
        self.stages, self.block_q, _ = self.buffers.q.shape
        self.share = Share(index, whole, self.buffers.sums is not None, c)
        self.batch, self.kv_head = self.share.batch, self.share.kv_head
        self.blocks = self.blocks_of(None)
        if self.share.halves:
            of_half = self.blocks_of(self.share.which)
            self.blocks = tuple(map(self.share.either, self.blocks, of_half))
        self.first, _, _, last = self.blocks
        self.count = last - self.first

    def blocks_of(self, part: Any) -> Any:
        """Of all keys, or of 64 of them."""
        refs = self.refs
        at = self.batch, self.share.block, refs.lengths, refs.offset, refs.bounds
        return query_blocks(*at, self.c, KEYS, self.block_q, part)
