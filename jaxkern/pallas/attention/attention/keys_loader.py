"""The warpgroup of the keys kernel that keeps operands in shared memory."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.gradient_blocks import CONSUMERS
from jaxkern.pallas.attention.attention.keys_tiles import Program
from jaxkern.pallas.attention.attention.pairs import own
from jaxkern.pallas.attention.attention.problem import ROWS


def load(program: Program) -> None:
    """Keys and values once, then all that belongs to queries, a block at a time."""
    refs, buffers, barriers = program.refs, program.buffers, program.barriers
    share, batch, count = program.share, program.batch, program.count
    plgpu.set_max_registers(24, action="decrease")
    for w in range(CONSUMERS):
        rows = pl.ds(share.row(w), ROWS)
        for source, target in ((refs.k, buffers.k), (refs.v, buffers.v)):
            plgpu.copy_gmem_to_smem(
                source.at[batch, rows, program.kv_head],
                target.at[w],
                barriers.ready.at[w],
            )

    def step(i, _):
        slot = lax.rem(i, jnp.int32(program.stages))
        whose, j = share.from_ring(i)
        head = share.head(whose, lax.div(j, count))
        first = (program.first + lax.rem(j, count)) * program.block_q
        rows = pl.ds(first, program.block_q)
        plgpu.barrier_wait(barriers.free.at[slot])
        full = barriers.full.at[slot]
        for source, target in ((refs.q, buffers.q), (refs.dout, buffers.dout)):
            plgpu.copy_gmem_to_smem(source.at[batch, rows, head], target.at[slot], full)
        for source, target in ((refs.lse2, buffers.lse2), (refs.delta, buffers.delta)):
            plgpu.copy_gmem_to_smem(source.at[batch, head, rows], target.at[slot], full)
        if buffers.bias is not None:
            for w in range(CONSUMERS):
                columns = pl.ds((share.block * CONSUMERS + w) * ROWS, ROWS)
                mine = own(refs.bias, batch, head)
                plgpu.copy_gmem_to_smem(
                    refs.bias.at[*mine, rows, columns], buffers.bias.at[slot, w], full
                )

    lax.fori_loop(0, count * program.c.group, step, None)
    for slot in range(program.stages):
        plgpu.barrier_wait(barriers.free.at[slot])
