"""What the programs of a cluster tell each other, through their shared memories.

A value is stored in the memory of another program together with a count of bytes on a
barrier there: who waits for all bytes needs no fence and no barrier of the cluster. The
interpreter knows no memory of others: there it goes through that of the device.
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
from jaxkern.pallas.sampling.sample.plan import (
    BINS,
    COPIES,
    LANES,
    WARPGROUPS,
    WARPS,
    Plan,
    by_thread,
    in_each_warp,
)

BARRIERS = 4  # of 8 bytes: two exchanges by warps, parts of sums, sums
PARTS, SUMS = 2, 3


def element(register: ir.Value, i: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=[i])


def integer(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def lane() -> ir.Value:
    return arith.andi(utils.thread_idx(), integer(LANES - 1))


def warp_of_program() -> ir.Value:
    return arith.shrui(utils.thread_idx(), integer(5))


def address_of(ref: Any) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def words_beyond(address: ir.Value, words: ir.Value) -> ir.Value:
    return arith.addi(address, arith.muli(words, integer(4)))


def assembly(text: str, *operands: ir.Value) -> None:
    kinds = "".join("f" if o.type == ir.F32Type.get() else "r" for o in operands)
    llvm.inline_asm(
        None,
        operands,
        text,
        ",".join([*kinds, "~{memory}"]),
        has_side_effects=True,
    )


def send(
    value: ir.Value,
    program: ir.Value,
    below: int | ir.Value,
    address: ir.Value,
    barriers: ir.Value,
    number: int,
) -> None:
    """To where `address` of this program is in another one, if that is `below`."""
    below = integer(below) if isinstance(below, int) else below
    assembly(
        "{ .reg .pred p; .reg .b32 at, bar; setp.lt.u32 p, $1, $2; "
        "mapa.shared::cluster.u32 at, $3, $1; "
        "mapa.shared::cluster.u32 bar, $4, $1; "
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 "
        f"[at], $0, [bar + {8 * number}]; }}",
        value,
        program,
        below,
        address,
        barriers,
    )


def exchange_memory(c: Plan) -> tuple:
    """Of a program: numbers by warps and of warps, parts, sums, barriers."""
    return (
        plgpu.SMEM((2, c.warps), jnp.float32),
        plgpu.SMEM((2, BINS), jnp.float32),
        plgpu.SMEM((BINS,), jnp.float32),
        plgpu.SMEM((2 * BARRIERS,), jnp.int32),
        plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=WARPGROUPS),
    )


def exchanged_by_device(c: Plan) -> tuple[jax.ShapeDtypeStruct, ...]:
    """In the interpreter."""
    return (
        jax.ShapeDtypeStruct((c.n, 2, c.warps), jnp.float32),
        jax.ShapeDtypeStruct((c.n, 2, c.cluster, BINS), jnp.float32),
    )


class Exchange:
    """By warps in the order of the row, or by bins; all take part in each."""

    def __init__(self, c: Plan, place: Any, shared: Any, device: Any, interpret: bool):
        self.c, self.interpret = c, interpret
        self.row, self.rank, self.me = place
        self.by_warp, self.parts, self.sums, self.barriers, self.met = shared
        self.device = device

    def start(self) -> None:
        """All of the cluster do, and `await_start` before anything is sent."""
        if not self.interpret:
            inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
            inline(self.arm)(self.barriers)

    def await_start(self) -> None:
        if not self.interpret:
            inline: Any = plgpu.inline_mgpu()
            inline(lambda _: assembly("barrier.cluster.wait.acquire;"))()

    def arm(self, _, barriers) -> None:
        bytes_of = [4 * self.c.warps] * 2 + [4 * BINS] * 2
        first = "setp.eq.u32 p, $1, 0; "
        arms = "".join(
            f"@p mbarrier.init.shared::cta.b64 [$0 + {8 * i}], 1; "
            "@p mbarrier.arrive.expect_tx.shared::cta.b64 "
            f"_, [$0 + {8 * i}], {count}; "
            for i, count in enumerate(bytes_of)
        )
        assembly(
            f"{{ .reg .pred p; {first}{arms}"
            "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; }",
            address_of(barriers),
            utils.thread_idx(),
        )

    def wait(self, number: int, phase: Any) -> None:
        """Until all bytes have come; the first thread then arms the barrier again."""

        def emit(_, barriers, phase):
            again = 4 * BINS
            assembly(
                "{ .reg .pred p; "
                "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 "
                f"p, [$0 + {8 * number}], $1; @!p bra AGAIN; "
                "setp.eq.u32 p, $2, 0; "
                "@p mbarrier.arrive.expect_tx.shared::cta.b64 "
                f"_, [$0 + {8 * number}], {again}; }}",
                address_of(barriers),
                phase.registers.item(),
                utils.thread_idx(),
            )

        inline: Any = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT)
        )
        inline(emit)(self.barriers, phase)

    def meet(self) -> None:
        """In the interpreter."""
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)

    def of_warps(self, turn: int, value: jax.Array) -> jax.Array:
        """The value per line of a warpgroup, of all warps of the cluster."""
        c = self.c
        mine = pl.ds((self.rank * WARPGROUPS + self.me) * WARPS, WARPS)
        layout = in_each_warp(c.warps)
        if self.interpret:
            ref = self.device[0].at[self.row, turn]
            store(ref.at[mine], value)
            self.meet()
            return plgpu.load(ref, layout=layout, optimized=False)

        def give(_, value, ref, barriers):
            """A lane each to one program."""
            [register] = value.registers.flat
            warp = arith.andi(warp_of_program(), integer(WARPS - 1))
            address = words_beyond(address_of(ref), warp)
            send(
                element(register, 0),
                lane(),
                c.cluster,
                address,
                address_of(barriers),
                turn,
            )

        inline: Any = plgpu.inline_mgpu(
            arg_types=(c.layout.reduce((1,)), plgpu.RefType(), plgpu.RefType())
        )
        inline(give)(value, self.by_warp.at[turn, mine], self.barriers)
        self.wait(turn, jnp.int32(0))
        return plgpu.load(self.by_warp.at[turn], layout=layout, optimized=False)

    def of_bins(self, turn: Any, value: jax.Array) -> jax.Array:
        """The sums of the cluster of bins, `[BINS]`; a warpgroup has half of them."""
        parity = lax.rem(turn, jnp.int32(2))
        if self.interpret:
            mine = pl.ds(self.me * WARPS * LANES, WARPS * LANES)
            ref = self.device[1].at[self.row, parity]
            store(ref.at[self.rank, mine], value)
            self.meet()
            return jnp.sum(ref[...], axis=0)
        c = self.c
        share = BINS // c.cluster  # of bins, that a program sums up

        def scatter(_, value, ref, barriers):
            [register] = value.registers.flat
            bin_ = utils.thread_idx()
            at = words_beyond(address_of(ref), arith.remui(bin_, integer(share)))
            to = arith.divui(bin_, integer(share))
            send(element(register, 0), to, c.cluster, at, address_of(barriers), PARTS)

        def gather(_, value, ref, barriers):
            """A warp each to one program."""
            [register] = value.registers.flat
            [size] = ir.VectorType(register.type).shape
            first = arith.muli(lane(), integer(size))
            for i in range(size):
                at = words_beyond(address_of(ref), arith.addi(first, integer(i)))
                send(
                    element(register, i),
                    warp_of_program(),
                    c.cluster,
                    at,
                    address_of(barriers),
                    SUMS,
                )

        layout = by_thread(COPIES).reduce((1,))
        inline: Any = plgpu.inline_mgpu(
            arg_types=(layout, plgpu.RefType(), plgpu.RefType())
        )
        mine = pl.ds(self.rank * share, share)
        inline(scatter)(value, self.parts.at[parity, mine], self.barriers)
        self.wait(PARTS, parity)
        layout = in_each_warp(share)
        total = None
        for rank in range(c.cluster):
            ref = self.parts.at[parity, pl.ds(rank * share, share)]
            part = plgpu.load(ref, layout=layout, optimized=False)
            total = part if total is None else total + part
        inline = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), plgpu.RefType()))
        inline(gather)(total, self.sums.at[mine], self.barriers)
        self.wait(SUMS, parity)
        return plgpu.load(self.sums, layout=in_each_warp(BINS), optimized=False)
