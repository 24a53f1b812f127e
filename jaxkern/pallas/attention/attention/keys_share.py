"""Which keys and heads a program of the kernel that holds keys has."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.gradient_blocks import CONSUMERS, place_keys
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import WGMMA


class Share:
    """KEYS keys, 64 in each consumer, and all heads of their group; or a half of that.

    Where programs take equally long, those of the last round of the multiprocessors are
    halves: of 64 keys, which both consumers hold, each for half of the heads. The ring
    of queries then has a block for either consumer by turns, and the sums of both are
    added at the end.

    Attributes:
      halves: whether there are any, which is known when the kernel is compiled.
      half: whether this program is one.
      which: half of the keys.
      batch, kv_head, block: of KEYS keys.
      members: how many heads a consumer walks through.
    """

    def __init__(self, program: Any, whole: int, halves: bool, c: Problem):
        self.c, self.halves = c, halves
        self.half, self.which = False, 0
        if halves:
            behind = lax.max(program - whole, jnp.int32(0))
            self.half, self.which = program >= whole, lax.rem(behind, jnp.int32(2))
            program = lax.min(program, whole + lax.div(behind, jnp.int32(2)))
        self.batch, self.kv_head, self.block = place_keys(program, c)
        self.members = self.either(c.group, c.group // 2)

    def either(self, of_whole: Any, of_half: Any) -> Any:
        return jnp.where(self.half, of_half, of_whole) if self.halves else of_whole

    def part(self, consumer: Any) -> Any:
        """Which 64 of the KEYS keys a consumer holds."""
        return self.either(consumer, self.which)

    def row(self, consumer: Any) -> Any:
        return (self.block * CONSUMERS + self.part(consumer)) * ROWS

    def head(self, consumer: Any, member: Any) -> Any:
        first = self.either(0, consumer * (self.c.group // 2))
        return self.kv_head * self.c.group + first + member

    def in_ring(self, consumer: Any, i: Any) -> Any:
        """The number in the ring of a consumer's i-th block."""
        return self.either(i, CONSUMERS * i + consumer)

    def from_ring(self, i: Any) -> tuple[Any, Any]:
        """(consumer, number of its block), the other way."""
        whose, number = lax.rem(i, CONSUMERS), lax.div(i, CONSUMERS)
        return whose, self.either(i, number)

    def release(self, free: Any) -> None:
        """A slot of the ring, for the other consumer too if that does not read it."""
        plgpu.barrier_arrive(free)
        if self.halves:

            @pl.when(self.half)
            def for_the_other():
                plgpu.barrier_arrive(free)

    def summed(self, me: Any, sums: Any, sum_smem: Any, written: Any, read: Any) -> Any:
        """The sums of both consumers of a half, in the first."""
        if not self.halves:
            return sums

        def part(x):
            return sum_smem.at[:, pl.ds(0, x.shape[1])]

        @pl.when(jnp.logical_and(self.half, me > 0))
        def give():
            for n, x in enumerate(sums):
                if n:
                    plgpu.barrier_wait(read)
                part(x)[...] = x
                plgpu.barrier_arrive(written)

        def take(_, sums):
            result = []
            for n, x in enumerate(sums):
                if n:
                    plgpu.barrier_arrive(read)
                plgpu.barrier_wait(written)
                result.append(x + plgpu.load(part(x), layout=WGMMA))
            return result

        takes = jnp.logical_and(self.half, me == 0).astype(jnp.int32)
        return lax.fori_loop(0, takes, take, sums)

    def stores(self, me: Any) -> Any:
        """Whether a consumer has a result."""
        return self.either(True, me == 0)
