"""What the programs of a cluster tell each other, through their shared memories.

The interpreter knows no memory of others: there it goes through that of the device.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxkern.pallas.rows.clusters import store
from jaxkern.pallas.sampling.plan import (
    BINS,
    COPIES,
    LANES,
    WARPGROUPS,
    WARPS,
    Plan,
    by_thread,
    in_each_warp,
)


def element(register: ir.Value, i: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=[i])


def integer(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def thread_of_program() -> ir.Value:
    return utils.thread_idx()


def lane() -> ir.Value:
    return arith.andi(utils.thread_idx(), integer(LANES - 1))


def warp_of_program() -> ir.Value:
    return arith.shrui(utils.thread_idx(), integer(5))


def address_of(ref: Any) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def bytes_beyond(address: ir.Value, words: ir.Value) -> ir.Value:
    return arith.addi(address, arith.muli(words, integer(4)))


def store_in(program: ir.Value, address: ir.Value, value: ir.Value) -> None:
    """To where `address` of this program is in another of the cluster."""
    llvm.inline_asm(
        None,
        [address, program, value],
        "{ .reg .b32 at; mapa.shared::cluster.u32 at, $0, $1; "
        "st.shared::cluster.f32 [at], $2; }",
        "r,r,f,~{memory}",
        has_side_effects=True,
    )


def meet(_) -> None:
    """What programs stored before it, the cluster sees after it."""
    llvm.inline_asm(
        None,
        [],
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
        "~{memory}",
        has_side_effects=True,
    )


class Exchange:
    """By warps in the order of the row, or by bins; all take part in each."""

    def __init__(self, c: Plan, place: Any, shared: Any, device: Any, interpret: bool):
        self.c, self.interpret = c, interpret
        self.row, self.rank, self.me = place
        self.by_warp, self.parts, self.total, self.met = shared
        self.by_warp_of_device, self.parts_of_device = device

    def meet(self) -> None:
        if not self.interpret:
            inline: Any = plgpu.inline_mgpu()
            inline(meet)()
            return
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)

    def of_warps(self, turn: int, value: jax.Array) -> jax.Array:
        """The value per line of a warpgroup, of all warps of the cluster."""
        c = self.c
        mine = pl.ds((self.rank * WARPGROUPS + self.me) * WARPS, WARPS)
        layout = in_each_warp(c.warps)
        if self.interpret:
            store(self.by_warp_of_device.at[self.row, turn, mine], value)
            self.meet()
            ref = self.by_warp_of_device.at[self.row, turn]
            return plgpu.load(ref, layout=layout, optimized=False)

        def give(_, value, ref):
            [register] = value.registers.flat
            warp = arith.andi(warp_of_program(), integer(WARPS - 1))
            address = bytes_beyond(address_of(ref), warp)
            to = arith.remui(lane(), integer(c.cluster))
            store_in(to, address, element(register, 0))

        inline: Any = plgpu.inline_mgpu(
            arg_types=(c.layout.reduce((1,)), plgpu.RefType())
        )
        inline(give)(value, self.by_warp.at[turn, mine])
        self.meet()
        return plgpu.load(self.by_warp.at[turn], layout=layout, optimized=False)

    def of_bins(self, turn: Any, value: jax.Array) -> jax.Array:
        """The sums of the cluster of bins, `[BINS]`; a warpgroup has half of them."""
        c = self.c
        share = BINS // c.cluster  # of bins, that a program sums up
        if self.interpret:
            mine = pl.ds(self.me * WARPS * LANES, WARPS * LANES)
            turn = lax.rem(turn, 2)
            store(self.parts_of_device.at[self.row, turn, self.rank, mine], value)
            self.meet()
            return jnp.sum(self.parts_of_device[self.row, turn], axis=0)

        def scatter(_, value, ref):
            [register] = value.registers.flat
            bin_ = thread_of_program()
            address = bytes_beyond(address_of(ref), arith.remui(bin_, integer(share)))
            store_in(arith.divui(bin_, integer(share)), address, element(register, 0))

        def gather(_, value, ref):
            [register] = value.registers.flat
            [size] = ir.VectorType(register.type).shape
            to = arith.remui(warp_of_program(), integer(c.cluster))
            first = arith.remui(arith.muli(lane(), integer(size)), integer(share))
            for i in range(size):
                at = arith.addi(first, integer(i))
                store_in(to, bytes_beyond(address_of(ref), at), element(register, i))

        layout = by_thread(COPIES).reduce((1,))
        inline: Any = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
        inline(scatter)(value, self.parts.at[pl.ds(self.rank * share, share)])
        self.meet()
        layout = in_each_warp(share)
        total = None
        for rank in range(c.cluster):
            part = plgpu.load(
                self.parts.at[pl.ds(rank * share, share)],
                layout=layout,
                optimized=False,
            )
            total = part if total is None else total + part
        inline = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
        inline(gather)(total, self.total.at[pl.ds(self.rank * share, share)])
        self.meet()
        return plgpu.load(self.total, layout=in_each_warp(BINS), optimized=False)
