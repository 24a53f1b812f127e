"""The warpgroups of the kernel of five products that copy: operands, and dq."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.gradient_blocks import BLOCK, CONSUMERS, STAGES
from jaxkern.pallas.attention.attention.joint_tiles import Program
from jaxkern.pallas.attention.attention.problem import ROWS
from jaxkern.pallas.attention.attention.rows import LINES


def load(program: Program) -> None:
    """Keys and values once, then all that belongs to queries, a block at a time."""
    refs, buffers, barriers = program.refs, program.buffers, program.barriers
    batch = program.batch
    plgpu.set_max_registers(24, action="decrease")
    for w in range(CONSUMERS):
        rows = pl.ds((program.block * CONSUMERS + w) * ROWS, ROWS)
        for source, target in ((refs.k, buffers.k), (refs.v, buffers.v)):
            plgpu.copy_gmem_to_smem(
                source.at[batch, rows, program.kv_head], target.at[w], barriers.held
            )

    def fetch(i, head, j):
        slot = lax.rem(i, jnp.int32(STAGES))
        rows = pl.ds(j * BLOCK, BLOCK)
        plgpu.barrier_wait(barriers.free.at[slot])
        for source, target in (
            (refs.q.at[batch, rows, head], buffers.q),
            (refs.dout.at[batch, rows, head], buffers.dout),
            (refs.lse2.at[batch, head, rows], buffers.lse2),
            (refs.delta.at[batch, head, rows], buffers.delta),
            (refs.counts.at[batch, head, rows], buffers.counts),
        ):
            plgpu.copy_gmem_to_smem(source, target.at[slot], barriers.full.at[slot])

    program.walk_all(fetch)
    for slot in range(STAGES):
        plgpu.barrier_wait(barriers.free.at[slot])


def add(program: Program) -> None:
    """What each step adds to dq, by the copy engine."""
    dq_smem, full, free = (
        program.buffers.dq,
        program.barriers.dq_full,
        program.barriers.dq_free,
    )
    plgpu.set_max_registers(24, action="decrease")
    for w in range(CONSUMERS):
        plgpu.barrier_arrive(free.at[w])
    # dq of the first step, which is nobody's
    for w in range(CONSUMERS):
        plgpu.barrier_wait(full.at[w])
        plgpu.barrier_arrive(free.at[w])

    def add_block(_, head, j):
        for w in range(CONSUMERS):
            lines = pl.ds((j * CONSUMERS + w) * LINES[0], LINES[0])
            target = program.refs.dq.at[program.batch, head, lines]
            plgpu.barrier_wait(full.at[w])
            if program.interpret:  # which cannot add as it copies
                target[...] = target[...] + dq_smem.at[w][...]
            else:
                plgpu.copy_smem_to_gmem(dq_smem.at[w], target, reduction_op="add")
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(free.at[w])

    program.walk_all(add_block)
    plgpu.wait_smem_to_gmem(0)
