"""Which keys of which sequences each program of the decode kernel on Hopper reads."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128  # threads of a warpgroup, one sequence each
PAIR = 2  # programs of a cluster
AT_ONCE = 16  # lengths
MERGE_BYTES = 2**16  # that a program reads in the time of a merge
BY_THREAD = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What shapes and options fix.

    Attributes:
      b, s, k, group, h: sizes; `group` query heads share a key head.
      scale: of q k^T, with log2 e.
      block, stages: keys of a block, blocks in shared memory.
      cluster: programs of a cluster.
      clusters: of the grid.
      workers: clusters, or programs that work alone, where lengths are alike.
      alone: programs work alone there.
      uneven: lengths can differ.
    """

    b: int
    s: int
    k: int
    group: int
    h: int
    scale: float
    block: int
    stages: int
    cluster: int
    clusters: int
    workers: int
    alone: bool
    uneven: bool

    @property
    def ahead(self) -> bool:
        """The first block is loaded before the lengths are known."""
        return self.alone and self.uneven

    @property
    def heads(self) -> int:
        """Key heads of all sequences."""
        return self.b * self.k


class Part(NamedTuple):
    """Blocks [start, stop) of a head's keys, of which `end` are seen."""

    head: Any  # of all sequences
    batch: Any
    end: Any
    start: Any
    stop: Any


def int32(x) -> Any:
    return jnp.asarray(x, jnp.int32)


class Walk:
    """Of one program: whole heads, or with the other one of its cluster halves of them.

    Where sequences are not about as long as each other, programs or clusters take the
    heads from the longest sequence to the shortest, back and forth, so that each has as
    many keys. Clusters do if the longest would take one program too long. A head with
    more keys than there are for each of them has one for itself.
    """

    def __init__(self, c: Problem, lengths_ref: Any, offset_ref: Any, order_ref: Any):
        self.c, self.lengths_ref, self.offset_ref = c, lengths_ref, offset_ref
        self.order_ref = order_ref
        self.cluster = lax.axis_index("cluster")
        self.rank = lax.axis_index("rank") if c.cluster > 1 else int32(0)
        self.alike, divided = jnp.asarray(True), jnp.asarray(False)
        some, lone = int32(c.cluster * c.clusters), int32(0)
        if c.uneven:
            longest, total = self.over_sequences(
                self.end,
                lambda _, end, carry: (lax.max(carry[0], end), carry[1] + end),
                (int32(0), int32(0)),
                LANES,
            )
            self.alike = c.b * longest - total <= lax.div(total, int32(4))
            # programs read a third faster if others have nothing to read
            share = lax.div(total, int32(PAIR * c.clusters)) * c.k
            merges = c.heads // c.clusters * (MERGE_BYTES // (4 * c.h))
            divided = 3 * lax.div(longest, int32(4)) > share + merges
            some = jnp.where(divided, c.clusters, some)
            most = (lax.div(total, some) + 1) * c.k
            lone = lax.cond(self.alike, lambda: int32(0), lambda: self.sort(most))
        self.lone = lone
        self.together = jnp.where(self.alike, not c.alone, divided)
        alone = self.cluster * c.cluster + self.rank
        self.worker = jnp.where(self.together, self.cluster, alone)
        self.workers = jnp.where(self.alike, c.workers, some) - lone
        rounds = lax.div(c.heads - lone, self.workers)
        rest = c.heads - lone - rounds * self.workers
        self.count = rounds + jnp.where(self.place(rounds) < rest, 1, 0)
        there = self.worker < self.workers + lone
        self.count = jnp.where(self.worker < lone, 1, jnp.where(there, self.count, 0))
        # with the first block of the head of its own number
        self.begun = self.alike & c.alone & (self.count > 0)

    def end(self, batch):
        """Keys that are seen."""
        end = int32(self.c.s)
        if self.offset_ref is not None:
            end = lax.min(lax.max(self.offset_ref[batch], int32(-1)), end - 1) + 1
        if self.lengths_ref is not None:
            end = lax.min(lax.max(self.lengths_ref[batch], int32(0)), end)
        return end

    def over_sequences(self, read, step, carry, most=AT_ONCE):
        """`step(j, read(j), carry)` over all sequences; up to `most` load at once."""
        width = math.gcd(self.c.b, most)

        def several(i, carry):
            at = [i * width + j for j in range(width)]
            for j, x in zip(at, [read(j) for j in at], strict=True):
                carry = step(j, x, carry)
            return carry

        return lax.fori_loop(0, self.c.b // width, several, carry)

    def sequences(self):
        return plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=BY_THREAD)

    def sort(self, most):
        """Numbers of sequences, from the longest to the shortest, to `order_ref`.

        Returns the number of heads with more keys than `most`.
        """
        sequence = self.sequences()
        nothing = plgpu.layout_cast(jnp.zeros((LANES,), jnp.int32), BY_THREAD)

        def place(j, end, ends):
            return jnp.where(sequence == j, end, ends)

        own = self.over_sequences(self.end, place, nothing)

        def count(j, end, carry):
            rank, longer = carry
            before = (end > own) | ((end == own) & (sequence > j))
            return rank + jnp.where(before, 1, 0), longer + jnp.where(end > most, 1, 0)

        # a sum over threads would take the shared memory of another warpgroup's
        rank, longer = self.over_sequences(self.end, count, (nothing, int32(0)))
        self.order_ref[...] = rank
        plgpu.commit_smem()

        def invert(j, rank, order):
            return jnp.where(sequence == rank, j, order)

        order = self.over_sequences(lambda j: self.order_ref[j], invert, nothing)
        plgpu.commit_smem()
        self.order_ref[...] = order
        plgpu.commit_smem()
        return longer * self.c.k

    def place(self, i):
        """Of the worker's i-th head among those that all take then."""
        worker = self.worker - self.lone
        back = self.workers - 1 - worker
        return jnp.where(lax.rem(i, int32(2)) == 0, worker, back)

    def part(self, i) -> Part:
        c = self.c
        index = self.lone + i * self.workers + self.place(i)
        index = jnp.where(self.worker < self.lone, self.worker, index)
        batch, head = lax.div(index, int32(c.k)), lax.rem(index, int32(c.k))
        if c.uneven:
            batch = lax.cond(self.alike, lambda: batch, lambda: self.order_ref[batch])
        end = self.end(batch)
        blocks = lax.max(lax.div(end + (c.block - 1), int32(c.block)), int32(1))
        share = jnp.where(self.together, lax.div(blocks + 1, int32(PAIR)), blocks)
        start = jnp.where(self.together, self.rank * share, 0)
        stop = lax.min(start + share, blocks)
        return Part(batch * c.k + head, batch, end, start, stop)
