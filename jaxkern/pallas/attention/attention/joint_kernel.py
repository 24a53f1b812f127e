"""The kernel of five products: dq, dk and dv of 128 keys and the queries that see them.

joint_bwd.py has the idea. No barrier of a whole warpgroup is in the loop: threads write
what they hold, and what waits for it counts all of them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import nvvm

from jaxkern.pallas.attention.attention.blocks import position_and_length
from jaxkern.pallas.attention.attention.gradient_blocks import (
    BLOCK,
    CONSUMERS,
    KEYS,
    STAGES,
    back_and_forth,
    by_column,
    dot,
    dscale,
    place_keys,
    query_blocks,
    shown,
    slopes,
    store,
    sum_of,
    visible,
    walk_heads,
    weights,
    zeros,
)
from jaxkern.pallas.attention.attention.pairs import BY_COLUMN, BY_ROW
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.rows import HALF, LINES, thread_order
from jaxkern.pallas.attention.attention.wgmma import WGMMA, by_row, opaque, tiled

SLOTS = 3  # of dS: the one written, the one read and the one before


def integers(x):
    """x as int32; astype would clamp it first."""
    dtype = jnp.dtype(jnp.int32)
    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=WGMMA)

    def convert(_, x):
        return x.astype(ir.IntegerType.get_signless(32), is_signed=True)

    # what it decorates takes no context, which a type checker does not see
    inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=result)
    return inline(convert)(x)


def show_others() -> None:
    """What this thread wrote, to the tensor cores and the copy engine."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def store_slopes(x, ref, interpret: bool) -> None:
    """A matrix for WGMMA; no thread waits for another, as in `ref[...] = x`."""

    def store(_, x, ref):
        x.store_tiled(ref, swizzle=128)
        show_others()

    if interpret:
        ref[...] = x
    else:
        kinds = WGMMA, plgpu.RefType(tiled(ROWS, BLOCK))
        # what it decorates takes no context, which a type checker does not see
        inline: Any = plgpu.inline_mgpu(arg_types=kinds)
        inline(store)(x, ref)


def store_integers(x, ref, interpret: bool) -> None:
    """x in thread_order: each thread 16 bytes at a time, beside those of the next."""

    def store(_, x, ref):
        pairs = list(x.registers.flat)
        fours = [utils.vector_concat(pairs[n : n + 2]) for n in range(0, len(pairs), 2)]
        mgpu.FragmentedArray(
            _registers=np.array(fours, object),
            _layout=mgpu.WGStridedFragLayout(LINES, 4),
            _is_signed=True,
        ).store_untiled(ref)
        show_others()

    if interpret:
        ref[...] = thread_order(x.astype(jnp.int32))
    else:
        inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
        inline(store)(integers(x), ref)


def joint_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    counts_ref,
    q_ids_ref,
    kv_ids_ref,
    bounds_ref,
    lengths_ref,
    offset_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    buffers,
    barriers,
    *,
    c: Problem,
    interpret: bool,
):
    """dk and dv of KEYS keys, 64 in each consumer, and what they add to dq."""
    k_smem, v_smem, q_smem, dout_smem, rows_smem, ds_smem, dq_smem = buffers
    lse2_smem, delta_smem, counts_smem = rows_smem
    held, full, free, ds_ready, keys_free, dq_full, dq_free = barriers
    me = lax.axis_index("warpgroup")
    batch, kv_head, block = place_keys(lax.axis_index("program"), c)
    blocks = query_blocks(batch, block, lengths_ref, offset_ref, bounds_ref, c)
    first, _, _, last = blocks
    count = last - first
    steps = count * c.group

    def walk_all(f):
        """f(i, head, block of queries) for every step."""

        def head(member, i):
            def step(n, i):
                j = back_and_forth(n, kv_head, member, blocks, c)
                f(i, kv_head * c.group + member, j)
                return i + 1

            return lax.fori_loop(first, last, step, i)

        lax.fori_loop(0, c.group, head, jnp.int32(0))

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            rows = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, kv_head], target.at[w], held
                )

        def fetch(i, head, j):
            slot = lax.rem(i, jnp.int32(STAGES))
            rows = pl.ds(j * BLOCK, BLOCK)
            plgpu.barrier_wait(free.at[slot])
            for source, target in (
                (q_ref.at[batch, rows, head], q_smem),
                (dout_ref.at[batch, rows, head], dout_smem),
                (lse2_ref.at[batch, head, rows], lse2_smem),
                (delta_ref.at[batch, head, rows], delta_smem),
                (counts_ref.at[batch, head, rows], counts_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])

        walk_all(fetch)
        for slot in range(STAGES):
            plgpu.barrier_wait(free.at[slot])

    @pl.when(me == CONSUMERS + 1)
    def add():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            plgpu.barrier_arrive(dq_free.at[w])
        # dq of the first step, which is nobody's
        for w in range(CONSUMERS):
            plgpu.barrier_wait(dq_full.at[w])
            plgpu.barrier_arrive(dq_free.at[w])

        def add_block(_, head, j):
            for w in range(CONSUMERS):
                lines = pl.ds((j * CONSUMERS + w) * LINES[0], LINES[0])
                target = dq_ref.at[batch, head, lines]
                plgpu.barrier_wait(dq_full.at[w])
                if interpret:  # which cannot add as it copies
                    target[...] = target[...] + dq_smem.at[w][...]
                else:
                    plgpu.copy_smem_to_gmem(dq_smem.at[w], target, reduction_op="add")
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(dq_free.at[w])

        walk_all(add_block)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me < CONSUMERS)
    def differentiate():
        plgpu.set_max_registers(232, action="increase")
        for slot in range(STAGES):
            plgpu.barrier_arrive(free.at[slot])
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        row = (block * CONSUMERS + me) * ROWS
        kv_ids = None
        if kv_ids_ref is not None:
            ids = kv_ids_ref.at[batch, pl.ds(row, ROWS)]
            kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)
        dtype = q_ref.dtype
        half, part = pl.ds(me * HALF, HALF), (BLOCK, HALF)
        # The first step computes dq of zeros, which nobody adds.
        none = zeros((ROWS, BLOCK)).astype(dtype)
        store_slopes(none, ds_smem.at[SLOTS - 1, me], interpret)
        plgpu.barrier_arrive(ds_ready.at[SLOTS - 1])
        plgpu.barrier_wait(held)

        def issue_dq(acc, slot):
            for w in range(CONSUMERS):
                at = opaque(jnp.int32(w))
                ds = ds_smem.at[slot, at].transpose((1, 0))
                plgpu.wgmma(acc, ds, k_smem.at[at].at[:, half])

        def store_dq(dq, counts):
            plgpu.barrier_wait(dq_free.at[me])
            store_integers(dq * by_row(counts, dq.shape), dq_smem.at[me], interpret)
            plgpu.barrier_arrive(dq_full.at[me])

        def step(j, carry, masked, member):
            dv, dk, counts = carry
            i = member * count + j - first
            slot, ds_slot = lax.rem(i, jnp.int32(STAGES)), lax.rem(i, jnp.int32(SLOTS))
            before = lax.rem(i + SLOTS - 1, jnp.int32(SLOTS))
            q, dout = q_smem.at[slot], dout_smem.at[slot]
            plgpu.barrier_wait(full.at[slot])

            def rounded(s_acc, dp_acc):
                """(P, dS)."""
                mine = opaque(jnp.int32(me))
                plgpu.wgmma(s_acc, k_smem.at[mine], q.transpose((1, 0)))
                plgpu.wgmma(dp_acc, v_smem.at[mine], dout.transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                lse2 = plgpu.load(lse2_smem.at[slot], layout=BY_COLUMN)
                seen = None
                if masked:
                    seen = visible(
                        s.shape, 0, row, j * BLOCK, offset, length, c, interpret
                    )
                    at = batch, kv_head, row, j * BLOCK
                    seen = shown(seen, kv_ids, q_ids_ref, None, *at)
                p, _ = weights(s, None, by_column(lse2, s.shape), seen, c)
                # The other has also read what is overwritten below. Here, as ptxas
                # moves no exponentials over this branch, behind the end of dP.
                plgpu.barrier_wait(ds_ready.at[before])
                dp = dp_acc[...]
                delta = plgpu.load(delta_smem.at[slot], layout=BY_COLUMN)
                ds = slopes(p, dp, by_column(delta, s.shape), None)
                return p.astype(dtype), ds.astype(dtype)

            square = sum_of((ROWS, BLOCK))
            p, ds = pl.run_scoped(rounded, square, square)
            store_slopes(ds, ds_smem.at[ds_slot, me], interpret)
            plgpu.barrier_arrive(ds_ready.at[ds_slot])

            def products(dv_acc, dk_acc, dq_acc):
                if not interpret:  # which has no accumulators that start from values
                    dv_acc[...], dk_acc[...] = dv, dk
                    # Zeros that are no constant: ptxas keeps an accumulator of
                    # constants beside those of S and dP, has too few registers for
                    # that, and serialises all products.
                    nothing = jnp.minimum(jnp.abs(counts), 0.0)
                    dq_acc[...] = by_row(nothing, dq_acc.shape)
                issue_dq(dq_acc, before)
                if not interpret:
                    plgpu.wgmma(dv_acc, p, dout)
                    plgpu.wgmma(dk_acc, ds, q)
                dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)
                store_dq(dq, counts)
                if interpret:
                    return dv + dot(p, dout[...]), dk + dot(ds, q[...])
                return dv_acc[...], dk_acc[...]

            dv, dk = pl.run_scoped(products, *map(sum_of, (dv.shape, dk.shape, part)))
            counts = plgpu.load(counts_smem.at[slot], layout=BY_ROW)
            plgpu.barrier_arrive(free.at[slot])
            return dv, dk, counts

        counts = plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), BY_ROW)
        start = zeros((ROWS, c.hv)), zeros((ROWS, c.h)), counts
        dv, dk, counts = walk_heads(
            step, start, blocks, lengths_ref, bounds_ref, c, KEYS
        )
        slot = lax.rem(steps + SLOTS - 1, jnp.int32(SLOTS))
        plgpu.barrier_wait(ds_ready.at[slot])

        def rest(acc):
            issue_dq(acc, slot)
            return acc[...]

        store_dq(pl.run_scoped(rest, sum_of(part)), counts)
        plgpu.barrier_arrive(keys_free)
        plgpu.barrier_wait(keys_free)  # which the other consumer reads too
        mine = batch, pl.ds(row, ROWS), kv_head
        store(dk * dscale(c), k_smem.at[me], dk_ref.at[mine])
        store(dv, v_smem.at[me], dv_ref.at[mine])
        plgpu.barrier_wait(dq_free.at[me])
        plgpu.wait_smem_to_gmem(0)
