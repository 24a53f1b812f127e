"""The warpgroup of the queries kernel that keeps operands in shared memory."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.gradient_blocks import CONSUMERS
from jaxkern.pallas.attention.attention.pairs import own
from jaxkern.pallas.attention.attention.queries_tiles import (
    Barriers,
    Buffers,
    Program,
    rows_of,
    slot_of,
)


def load(program: Program, buffers: Buffers, barriers: Barriers) -> None:
    """Queries, dout and out of each tile once, then keys, values and bias by blocks."""
    refs, c = program.refs, program.c
    plgpu.set_max_registers(24, action="decrease")

    def tile(i, at):
        batch, head, block = program.place_of(i)
        first, _, _, last = program.blocks_of(batch, block)
        of_queries = [(refs.q, buffers.q), (refs.dout, buffers.dout)]
        if buffers.out is not None:
            of_queries.append((refs.out, buffers.out))
        for w in range(CONSUMERS):
            plgpu.barrier_wait(barriers.q_free.at[w])
            for source, target in of_queries:
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows_of(block, w), head],
                    target.at[w],
                    barriers.ready.at[w],
                )

        def step(j, at):
            keys = pl.ds(j * c.block_k, c.block_k)
            source = (batch, keys, lax.div(head, jnp.int32(c.group)))
            slot = slot_of(buffers.k, at)
            plgpu.barrier_wait(barriers.k_free.at[slot])
            plgpu.copy_gmem_to_smem(
                refs.k.at[source], buffers.k.at[slot], barriers.k_full.at[slot]
            )
            full = barriers.k_full if barriers.v_full is None else barriers.v_full
            slot = slot_of(buffers.v, at)
            if barriers.v_free is not None:
                plgpu.barrier_wait(barriers.v_free.at[slot])
            plgpu.copy_gmem_to_smem(
                refs.v.at[source], buffers.v.at[slot], full.at[slot]
            )
            if buffers.bias is not None:
                for w in range(CONSUMERS):
                    mine = own(refs.bias, batch, head)
                    plgpu.copy_gmem_to_smem(
                        refs.bias.at[*mine, rows_of(block, w), keys],
                        buffers.bias.at[slot, w],
                        full.at[slot],
                    )
            return at + 1

        return lax.fori_loop(first, last, step, at)

    program.walk(tile)
    for ring in (*barriers.free, barriers.q_free):
        for slot in range(ring.shape[0]):
            plgpu.barrier_wait(ring.at[slot])
