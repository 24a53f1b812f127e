"""A row of logits in the shared memory of a cluster: passes over it."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, nvvm, vector

from jaxkern.pallas.rows.clusters import store
from jaxkern.pallas.sampling.sample.exchange import (
    Exchange,
    element,
    integer,
    lane,
)
from jaxkern.pallas.sampling.sample.plan import (
    COPIES,
    LANES,
    STEP,
    WARPGROUPS,
    WARPS,
    Plan,
    by_thread,
)


def running_sum(x: jax.Array, layout: Any, interpret: bool) -> jax.Array:
    """The cumulative sum along the last axis, which a warp holds."""
    if interpret:
        return jnp.cumsum(x, -1)

    def emit(_, x):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        [register] = x.registers.flat
        [size] = ir.VectorType(register.type).shape
        lanes = x.shape[-1] // size  # others have copies
        place = arith.remui(lane(), integer(lanes))
        upto = [element(register, 0)]
        for i in range(1, size):
            upto.append(arith.addf(upto[-1], element(register, i)))

        def of_lane_before(value, distance):
            """0 in the first lanes."""
            bits = nvvm.shfl_sync(
                integer(0xFFFFFFFF),
                arith.bitcast(i32, value),
                integer(distance),
                integer(0),
                nvvm.ShflKind.up,
            )
            there = arith.cmpi(arith.CmpIPredicate.sge, place, integer(distance))
            return arith.select(there, arith.bitcast(f32, bits), mgpu.c(0.0, f32))

        total, distance = upto[-1], 1
        while distance < lanes:
            total = arith.addf(total, of_lane_before(total, distance))
            distance *= 2
        before = of_lane_before(total, 1)
        sums = vector.from_elements(
            register.type, [arith.addf(before, s) for s in upto]
        )
        registers = x.registers.copy()
        registers.flat[0] = sums
        return mgpu.FragmentedArray(
            _registers=registers, _layout=x.layout, _is_signed=None
        )

    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    return inline(emit)(x)


def join_program(_) -> None:
    gpu.barrier()


class ClusterRow:
    """The part of a warpgroup of a program."""

    def __init__(self, c: Plan, scratch: Any, device: Any, interpret: bool):
        self.c, self.interpret = c, interpret
        self.logits, self.bins, self.full, self.counted = scratch[:4]
        self.row, self.rank = lax.axis_index("row"), lax.axis_index("cluster")
        self.me = lax.axis_index("warpgroup")
        place = self.row, self.rank, self.me
        self.exchange = Exchange(c, place, scratch[4:], device, interpret)
        self.first_warp = (self.rank * WARPGROUPS + self.me) * WARPS

    def fetch(self, ref: Any) -> None:
        """All of this warpgroup at once. What lies behind the row is left out later."""
        c = self.c
        lines = c.lines_of_warp // c.chunks
        for k, w in itertools.product(range(c.chunks), range(WARPS)):
            first = (self.first_warp + w) * c.lines_of_warp + k * lines
            plgpu.copy_gmem_to_smem(
                ref.at[self.row, pl.ds(first, lines)],
                self.logits.at[self.me * WARPS + w, pl.ds(k * lines, lines)],
                self.full.at[self.me * c.chunks + k],
            )

    def line(self, k):
        return self.logits.at[pl.ds(self.me * WARPS, WARPS), k]

    def load(self, ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def read(self, k):
        return self.load(self.line(k), self.c.layout)

    def over_lines(self, add: Callable, init: Any = None, chunk: Any = None) -> Any:
        """carry = add(logits of a line of each warp, carry), all lines or a chunk's."""
        steps = self.c.lines_of_warp // STEP

        def step(i, carry):
            for k in range(STEP):
                carry = add(self.read(i * STEP + k), carry)
            return carry

        if chunk is None:
            return lax.fori_loop(0, steps, step, init)
        steps //= self.c.chunks
        return lax.fori_loop(chunk * steps, (chunk + 1) * steps, step, init)

    def as_it_comes(self, add: Callable, init: Any) -> Any:
        """`over_lines` while the last of them are still read."""

        def next_chunk(i, carry):
            plgpu.barrier_wait(self.full.at[self.me * self.c.chunks + i])
            self.leave_out(i)
            return self.over_lines(add, carry, i)

        return lax.fori_loop(0, self.c.chunks, next_chunk, init)

    def leave_out(self, chunk) -> None:
        """-inf for what lies behind the row."""
        c = self.c
        lines = c.lines_of_warp // c.chunks

        def rewrite(k, _):
            x = self.read(k)
            warp = plgpu.broadcasted_iota(jnp.int32, c.piece, 0, layout=c.layout)
            line = (self.first_warp + warp) * c.lines_of_warp + k
            x = jnp.where(line < c.lines, x, self.splat(-jnp.inf))
            store(self.line(k), x.astype(self.logits.dtype))

        @pl.when((self.first_warp + WARPS) * c.lines_of_warp > c.lines)
        def _():
            lax.fori_loop(chunk * lines, (chunk + 1) * lines, rewrite, None)

    def splat(self, value):
        return plgpu.layout_cast(
            jnp.full(self.c.piece, value, jnp.float32), self.c.layout
        )

    def mine(self):
        """The bins that this warpgroup adds up."""
        return pl.ds(self.me * WARPS * LANES, WARPS * LANES)

    def clear(self) -> None:
        zeros = jnp.zeros((WARPS * LANES, COPIES), jnp.uint32)
        mine = self.bins.at[self.mine()]
        store(mine, plgpu.layout_cast(zeros, by_thread(COPIES)))

    def join(self) -> None:
        """All threads of the program arrive."""
        if self.interpret:
            plgpu.barrier_arrive(self.counted)
            plgpu.barrier_wait(self.counted)
        else:
            inline: Any = plgpu.inline_mgpu()
            inline(join_program)()

    def bins_of_row(self, turn) -> jax.Array:
        """The sums of all bins; clears them."""
        self.join()
        layout = by_thread(COPIES)
        units = plgpu.load(self.bins.at[self.mine()], layout=layout, optimized=False)
        of_program = jnp.sum(units.astype(jnp.float32), axis=1)
        self.clear()
        return self.exchange.of_bins(turn, of_program)
