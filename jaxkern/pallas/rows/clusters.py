"""Rows that only a cluster of multiprocessors can hold, read once and written once.

A cluster of programs walks over rows, each program with its share of every row in
shared memory, chunk after chunk in a ring. One warpgroup has the copy engine load
chunks as soon as slots are free, also those of the next row; consumers add up what a
row needs, the cluster exchanges these sums, consumers then overwrite each chunk by its
result; the last warpgroup has the engine store it. So the loads of a row lie under the
sums and the stores of the row before. docs/design/triton_kernels.md has the
measurements.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm, nvvm

from jaxkern.pallas.mosaic_launch import kernel_name
from jaxkern.pallas.rows.plan import Plan


def store(ref: Any, x: jax.Array) -> None:
    """Also where threads store the same, which jax refuses from 0.12 on."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def ordered(interpret: bool) -> None:
    """What is written before this is seen before what is written after it."""
    if interpret:
        return

    def fence(_):
        llvm.inline_asm(
            None, [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True
        )

    inline: Any = plgpu.inline_mgpu()
    inline(fence)()


def show_copy_engine(interpret: bool) -> None:
    """What this thread wrote to shared memory."""
    if interpret:
        return

    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    inline: Any = plgpu.inline_mgpu()
    inline(fence)()


def join(interpret: bool) -> None:
    """All threads of a warpgroup arrive."""
    if interpret:
        return

    def wait(_):
        utils.warpgroup_barrier()

    inline: Any = plgpu.inline_mgpu()
    inline(wait)()


class Walk:
    """The part of one program; `barriers` are (full, written, free, met)."""

    def __init__(self, c: Plan, buffers, barriers, exchange_ref, interpret: bool):
        self.c, self.buffers, self.exchange_ref = c, buffers, exchange_ref
        self.full, self.written, self.free, self.met = barriers
        self.interpret = interpret
        self.cluster, self.rank = lax.axis_index("row"), lax.axis_index("cluster")
        self.me = lax.axis_index("warpgroup")
        rows = c.n - self.cluster + c.clusters - 1
        self.rows = lax.div(rows, jnp.int32(c.clusters))

    def row(self, i):
        return self.cluster + i * self.c.clusters

    def slot(self, t):
        return lax.rem(t, jnp.int32(self.c.slots))

    def first_line(self, j):
        """Of chunk j of this program."""
        return self.rank * self.c.most_lines + j * self.c.chunk[0]

    def at(self, ref, t, lines: int):
        """The first lines of chunk t in memory."""
        i, j = (
            lax.div(t, jnp.int32(self.c.chunks)),
            lax.rem(t, jnp.int32(self.c.chunks)),
        )
        return ref.at[self.row(i), pl.ds(self.first_line(j), lines)]

    def load(self, refs: Sequence[Any]) -> None:
        c = self.c

        def fetch(t, _):
            slot = self.slot(t)

            @pl.when(t >= c.slots)
            def _():
                plgpu.barrier_wait(self.free.at[slot])

            for ref, buffer in zip(refs, self.buffers, strict=True):
                plgpu.copy_gmem_to_smem(
                    self.at(ref, t, c.chunk[0]), buffer.at[slot], self.full.at[slot]
                )

        count = self.rows * c.chunks
        lax.fori_loop(0, count, fetch, None)

        def end(t, _):
            plgpu.barrier_wait(self.free.at[self.slot(t)])

        lax.fori_loop(count - lax.min(count, jnp.int32(c.slots)), count, end, None)

    def store(self, ref) -> None:
        """The last buffer goes back; what lies behind a row is the next row."""
        c = self.c

        def put(t, lines: int):
            part = self.buffers[-1].at[self.slot(t), pl.ds(0, lines)]
            plgpu.copy_smem_to_gmem(part, self.at(ref, t, lines))

        def row(i, _):
            def chunk(j, _, last=False):
                t = i * c.chunks + j
                plgpu.barrier_wait(self.written.at[self.slot(t)])
                most, fewest = c.tails if last else (c.chunk[0], c.chunk[0])
                if most == fewest:
                    put(t, most)
                else:
                    end = self.rank == c.cluster - 1
                    pl.when(end)(lambda: put(t, fewest))
                    pl.when(jnp.logical_not(end))(lambda: put(t, most))

                @pl.when(j > 0)
                def _():
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    plgpu.barrier_arrive(self.free.at[self.slot(t - 1)])

            lax.fori_loop(0, c.chunks - c.ragged, chunk, None)
            if c.ragged:
                chunk(jnp.int32(c.chunks - 1), None, True)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.free.at[self.slot((i + 1) * c.chunks - 1)])

        lax.fori_loop(0, self.rows, row, None)

    def piece(self, k: int):
        lines = self.c.piece[0]
        return pl.ds(self.me * self.c.share + k * lines, lines)

    def read(self, buffer: int, slot, k: int, sign: float = 1.0):
        """Piece k of this consumer, float32."""
        ref = self.buffers[buffer].at[slot, self.piece(k)]
        x = plgpu.load(ref, layout=self.c.layout, optimized=False)
        x = x.astype(jnp.float32)
        return -x if sign < 0 else x

    def write(self, slot, k: int, x) -> None:
        ref = self.buffers[-1].at[slot, self.piece(k)]
        store(ref, x.astype(ref.dtype))

    def inside(self, k: int):
        """Which elements of a piece of the last chunk the row has."""
        most, fewest = self.c.tails
        first = self.me * self.c.share + k * self.c.piece[0]
        end = jnp.where(self.rank == self.c.cluster - 1, fewest, most) - first
        line = plgpu.broadcasted_iota(jnp.int32, self.c.piece, 0, layout=self.c.layout)
        return line < end

    def splat(self, value):
        return plgpu.layout_cast(
            jnp.full(self.c.piece, value, jnp.float32), self.c.layout
        )

    def rows_of(
        self, init: Any, add: Callable, total: Callable, write: Callable
    ) -> None:
        """Each row: `add` over its chunks, `total` of it, then `write` of its chunks.

        add(slot, masked, carry) -> carry;  total(i, carry) -> sums;
        write(slot, j, sums) overwrites a chunk.
        """
        c = self.c

        def row(i, _):
            def more(j, carry, masked=False):
                slot = self.slot(i * c.chunks + j)
                plgpu.barrier_wait(self.full.at[slot])
                return add(slot, masked, carry)

            carry = lax.fori_loop(0, c.chunks - c.ragged, more, init)
            if c.ragged:
                carry = more(jnp.int32(c.chunks - 1), carry, True)
            sums = total(i, carry)

            def result(j, _):
                slot = self.slot(i * c.chunks + j)
                write(slot, j, sums)
                show_copy_engine(self.interpret)
                plgpu.barrier_arrive(self.written.at[slot])

            lax.fori_loop(0, c.chunks, result, None)

        lax.fori_loop(0, self.rows, row, None)

    def per_line(self, x):
        return plgpu.layout_cast(
            lax.broadcast_in_dim(x, self.c.piece, [0]), self.c.layout
        )

    def exchange(self, i, *values):
        """The values per line of all consumers of the cluster, each `[partners]`."""
        c = self.c
        where = lax.rem(i, jnp.int32(2))
        lines = c.piece[0]
        mine = (self.rank * c.consumers + self.me) * lines
        for number, value in enumerate(values):
            ref = self.exchange_ref.at[self.cluster, where, number, pl.ds(mine, lines)]
            store(ref, value)
        ordered(self.interpret)
        join(self.interpret)
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)
        ordered(self.interpret)
        return [
            plgpu.load(
                self.exchange_ref.at[self.cluster, where, number],
                layout=c.exchanged,
                optimized=False,
            )
            for number in range(len(values))
        ]


def walk_rows(
    c: Plan,
    inputs: Sequence[jax.Array],
    extra: Sequence[jax.Array],
    num_sums: int,
    consume: Callable,
    interpret: bool,
    name: str,
    more_out: Sequence[Any] = (),
) -> list[jax.Array]:
    """The result of rows `[n, d]`, in the dtype of the last input.

    `consume(walk, extra_refs, more_refs)` is the part of a consumer.
    """
    count = len(inputs)
    lines = [x.reshape(c.n, c.lines, c.width) for x in inputs]

    def kernel(*refs):
        refs = list(refs)
        in_refs, refs = refs[:count], refs[count:]
        extra_refs, refs = refs[: len(extra)], refs[len(extra) :]
        out_ref, exchange_ref, *refs = refs
        more_refs, (buffers, barriers) = refs[: len(more_out)], refs[len(more_out) :]
        walk = Walk(c, buffers, barriers, exchange_ref, interpret)

        @pl.when(walk.me == c.consumers)
        def _():
            walk.load(in_refs)

        @pl.when(walk.me == c.consumers + 1)
        def _():
            walk.store(out_ref)

        @pl.when(walk.me < c.consumers)
        def _():
            consume(walk, extra_refs, more_refs)

    out, _, *more = plgpu.kernel(
        kernel,
        kernel_name=kernel_name(
            name, consumers=c.consumers, pieces=c.pieces, slots=c.slots
        ),
        out_type=(
            jax.ShapeDtypeStruct(lines[-1].shape, lines[-1].dtype),
            jax.ShapeDtypeStruct((c.clusters, 2, num_sums, c.partners), jnp.float32),
            *more_out,
        ),
        grid=(c.clusters,),
        grid_names=("row",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=c.consumers + 2,
        thread_name="warpgroup",
        scratch_types=(
            tuple(plgpu.SMEM((c.slots, *c.chunk), x.dtype) for x in inputs),
            (
                plgpu.Barrier(num_barriers=c.slots, num_arrivals=count),
                plgpu.Barrier(num_barriers=c.slots, num_arrivals=c.consumers),
                plgpu.Barrier(num_barriers=c.slots),
                plgpu.ClusterBarrier(
                    collective_axes=("cluster",), num_arrivals=c.consumers
                ),
            ),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            approx_math=True,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*lines, *extra)
    return [out.reshape(inputs[-1].shape), *more]
