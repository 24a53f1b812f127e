"""The warpgroup that keeps queries, keys and values in shared memory."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.forward_tiles import (
    Barriers,
    Buffers,
    Program,
    slot_of,
)
from jaxkern.pallas.attention.attention.pairs import own
from jaxkern.pallas.attention.attention.problem import ROWS


def copy_pieces(source: Any, target: Any, full: Any) -> None:
    """Rows of queries or keys, piece by piece of their head dim."""
    pieces, _, width = target.shape
    if pieces == 1:
        plgpu.copy_gmem_to_smem(source, target.at[0], full)
        return
    for i in range(pieces):
        piece = source.at[:, pl.ds(i * width, width)]
        plgpu.copy_gmem_to_smem(piece, target.at[i], full)


def load(program: Program, buffers: Buffers, barriers: Barriers) -> None:
    refs, c = program.refs, program.c
    plgpu.set_max_registers(40 if c.consumers == 2 else 32, action="decrease")

    def tile(i, at):
        t = program.tile(i)

        def queries(w):
            return pl.ds(t.block * c.block_q + w * ROWS, ROWS)

        for w in range(c.consumers):
            plgpu.barrier_wait(barriers.q_free.at[w])
            source = refs.q.at[t.batch, queries(w), t.head]
            copy_pieces(source, buffers.q.at[w], barriers.q_full.at[w])

        def step(j, at):
            slot = slot_of(at, c)
            keys = pl.ds((t.last - 1 - j) * c.block_k, c.block_k)
            source = (t.batch, keys, lax.div(t.head, jnp.int32(c.group)))
            full = barriers.k_full.at[slot]
            plgpu.barrier_wait(barriers.k_free.at[slot])
            copy_pieces(refs.k.at[source], buffers.k.at[slot], full)
            if buffers.bias is not None:
                for w in range(c.consumers):
                    mine = own(refs.bias, t.batch, t.head)
                    plgpu.copy_gmem_to_smem(
                        refs.bias.at[*mine, queries(w), keys],
                        buffers.bias.at[slot, w],
                        full,
                    )
            plgpu.barrier_wait(barriers.v_free.at[slot])
            plgpu.copy_gmem_to_smem(
                refs.v.at[(*source, *t.columns)],
                buffers.v.at[slot],
                barriers.v_full.at[slot],
            )
            return at + 1

        return lax.fori_loop(0, t.count, step, at)

    lax.fori_loop(0, program.tiles(), tile, jnp.int32(0))
    for w in range(c.consumers):
        plgpu.barrier_wait(barriers.q_free.at[w])
    for slot in range(c.stages):
        plgpu.barrier_wait(barriers.k_free.at[slot])
        plgpu.barrier_wait(barriers.v_free.at[slot])
