"""dq of attention on Hopper, and dS: programs hold queries and walk over keys."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.blocks import (
    key_blocks,
    nth_tile,
    place,
    position_and_length,
)
from jaxkern.pallas.attention.attention.gradient_blocks import (
    CONSUMERS,
    NARROW,
    accumulated,
    dscale,
    in_order,
    inside,
    shown,
    store,
    sum_of,
    two_products,
    visible,
    walk,
    walk_part,
    weights,
    zeros,
)
from jaxkern.pallas.attention.attention.pairs import BY_ROW, bias_tile, copied_bias, own
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import (
    WGMMA,
    by_row,
    finished_sum,
    issue_sum,
    load_bytes,
    opaque,
    set_sum,
    with_tail,
)


def queries_kernel(
    out_ref,
    tail_ref,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    q_ids_ref,
    kv_ids_ref,
    bias_ref,
    words_ref,
    bounds_ref,
    lengths_ref,
    offset_ref,
    dq_ref,
    slopes_ref,
    delta_out_ref,
    buffers,
    barriers,
    *,
    c: Problem,
    interpret: bool,
):
    """dq of c.block_q queries, 64 in each consumer, and dS of their pairs if wanted.

    With `out`, delta is rowsum(dout out) more than `delta_ref`, and written too. What
    rounding took from `out` goes from memory to registers before the rest is there.
    """
    q_smem, dout_smem, out_smem, k_smem, v_smem, bias_smem = buffers[:6]
    dq_smem, slopes_smem = buffers[6:]
    ready, q_free, pause, k_full, k_free, v_full, v_free = barriers
    free = [k_free] if v_free is None else [k_free, v_free]
    me = lax.axis_index("warpgroup")
    program = lax.axis_index("program")
    several = c.programs < c.tiles  # tiles a program

    def place_of(i):
        """(batch, head, block) of the i-th tile of the program."""
        return place(nth_tile(i, program, c), c, several)

    def blocks_of(batch, block, consumer=None):
        at = batch, block, lengths_ref, offset_ref, bounds_ref
        return in_order(*key_blocks(*at, c, consumer))

    def walk_tiles(tile):
        """tile(i, number of blocks before it) for each; returns the next number."""
        if not several:
            return tile(0, jnp.int32(0))
        rounds = jnp.int32(c.tiles // c.programs)
        more = nth_tile(rounds, program, c) < c.tiles
        return lax.fori_loop(0, rounds + more.astype(jnp.int32), tile, jnp.int32(0))

    def slot_of(ring, j):
        return lax.rem(j, jnp.int32(ring.shape[0]))

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")

        def tile(i, at):
            batch, head, block = place_of(i)
            first, _, _, last = blocks_of(batch, block)

            def rows(w):
                return pl.ds((block * CONSUMERS + w) * ROWS, ROWS)

            of_queries = [(q_ref, q_smem), (dout_ref, dout_smem)]
            if out_smem is not None:
                of_queries.append((out_ref, out_smem))
            for w in range(CONSUMERS):
                plgpu.barrier_wait(q_free.at[w])
                for source, target in of_queries:
                    plgpu.copy_gmem_to_smem(
                        source.at[batch, rows(w), head], target.at[w], ready.at[w]
                    )

            def step(j, at):
                keys = pl.ds(j * c.block_k, c.block_k)
                source = (batch, keys, lax.div(head, jnp.int32(c.group)))
                slot = slot_of(k_smem, at)
                plgpu.barrier_wait(k_free.at[slot])
                plgpu.copy_gmem_to_smem(
                    k_ref.at[source], k_smem.at[slot], k_full.at[slot]
                )
                full = k_full if v_full is None else v_full
                slot = slot_of(v_smem, at)
                if v_free is not None:
                    plgpu.barrier_wait(v_free.at[slot])
                plgpu.copy_gmem_to_smem(
                    v_ref.at[source], v_smem.at[slot], full.at[slot]
                )
                if bias_smem is not None:
                    for w in range(CONSUMERS):
                        plgpu.copy_gmem_to_smem(
                            bias_ref.at[*own(bias_ref, batch, head), rows(w), keys],
                            bias_smem.at[slot, w],
                            full.at[slot],
                        )
                return at + 1

            return lax.fori_loop(first, last, step, at)

        walk_tiles(tile)
        for ring in (*free, q_free):
            for slot in range(ring.shape[0]):
                plgpu.barrier_wait(ring.at[slot])

    def differentiate_tile(i, at):
        batch, head, block = place_of(i)
        blocks, part = blocks_of(batch, block), blocks_of(batch, block, me)
        part = inside(blocks, part)
        first, _, _, last = blocks
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        row = (block * CONSUMERS + me) * ROWS
        rows = pl.ds(row, ROWS)
        lse2, delta = (
            plgpu.load(x.at[batch, head, rows], layout=BY_ROW, optimized=False)
            for x in (lse2_ref, delta_ref)
        )
        tail = None
        if tail_ref is not None:
            tail = load_bytes(tail_ref.at[batch, rows, head], interpret)
        plgpu.barrier_wait(ready.at[me])
        q_ids = None
        if q_ids_ref is not None:
            ids = q_ids_ref.at[batch, rows]
            q_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

        def slot_at(j):
            return slot_of(k_smem, at + j - first), slot_of(v_smem, at + j - first)

        def keys_and_values(j):
            """Of a block, when they are there."""
            k_slot, v_slot = slot_at(j)
            plgpu.barrier_wait(k_full.at[k_slot])
            if v_full is not None:
                plgpu.barrier_wait(v_full.at[v_slot])
            return k_smem.at[k_slot], v_smem.at[v_slot]

        def weights_of(s, j, masked):
            seen = bias = None
            key, v_slot = j * c.block_k, slot_at(j)[1]
            if bias_smem is not None:
                bias = copied_bias(bias_smem.at[v_slot, me])
            elif bias_ref is not None:
                bias = bias_tile(bias_ref, batch, head, row, key, s.shape)
            if v_free is not None:
                plgpu.barrier_arrive(v_free.at[v_slot])
            if masked:
                seen = visible(s.shape, 1, key, row, offset, length, c, interpret)
                where = batch, head, row, key
                seen = shown(seen, q_ids, kv_ids_ref, words_ref, *where)
            return weights(s, bias, by_row(lse2, s.shape), seen, c)

        def whole_delta():
            if out_smem is None:
                return delta
            both = (plgpu.load(x.at[me], layout=WGMMA) for x in (dout_smem, out_smem))
            dout, out = (x.astype(jnp.float32) for x in both)
            if tail is not None:
                out = with_tail(out, tail, out_ref.dtype)
            summed = delta + jnp.sum(dout * out, axis=1)
            delta_out_ref.at[batch, head, rows][...] = summed
            return summed

        def slopes_of(p, bent, dp, delta, j):
            """dS of S before the cap."""
            ds = p * (dp - by_row(delta, dp.shape))
            if slopes_ref is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_slopes(ds, j)
            if bent is not None:
                ds = ds * (1.0 - bent * bent)
            return ds.astype(q_ref.dtype)

        def slopes_at_once(j, masked):
            k, v = keys_and_values(j)
            held = opaque(me) if c.h + c.hv > NARROW else me
            s, dp = two_products(
                q_smem.at[held],
                k.transpose((1, 0)),
                dout_smem.at[held],
                v.transpose((1, 0)),
            )
            return slopes_of(*weights_of(s, j, masked), dp, delta, j)

        def add(j, dq, ds):
            k_slot, _ = slot_at(j)
            (dq,) = accumulated([dq], [(ds, k_smem.at[k_slot])], interpret)
            plgpu.barrier_arrive(k_free.at[k_slot])
            return dq

        def step(j, dq, masked):
            return add(j, dq, slopes_at_once(j, masked))

        def hold():
            """ptxas moves no exponentials over a wait, behind the end of dP."""
            plgpu.barrier_arrive(pause.at[me])
            plgpu.barrier_wait(pause.at[me])

        def first_slopes(j, masked):
            """(dS, delta); delta is summed beside the products."""
            k, v = keys_and_values(j)

            def products(s_acc, dp_acc):
                plgpu.wgmma(s_acc, q_smem.at[me], k.transpose((1, 0)))
                plgpu.wgmma(dp_acc, dout_smem.at[me], v.transpose((1, 0)))
                delta = whole_delta()
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                p, bent = weights_of(s, j, masked)
                hold()
                return p, bent, dp_acc[...], delta

            square = sum_of((ROWS, c.block_k))
            p, bent, dp, delta = pl.run_scoped(products, square, square)
            return slopes_of(p, bent, dp, delta, j), delta

        def step_behind(j, carry, masked):
            """The product for dq of the block before lies under the exponentials."""
            dq, before, delta = carry
            k_slot_before, _ = slot_at(j - 1)
            k_before = k_smem.at[k_slot_before]
            k, v = keys_and_values(j)

            def products(s_acc, dp_acc, dq_acc):
                set_sum(dq_acc, dq, interpret)
                plgpu.wgmma(s_acc, q_smem.at[me], k.transpose((1, 0)))
                issue_sum(dq_acc, before, k_before, interpret)
                plgpu.wgmma(dp_acc, dout_smem.at[me], v.transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=2)
                p, bent = weights_of(s, j, masked)
                hold()
                dp = dp_acc[...]
                summed = finished_sum(dq_acc, dq, before, k_before, interpret)
                return summed, p, bent, dp

            square = sum_of((ROWS, c.block_k))
            dq, p, bent, dp = pl.run_scoped(products, square, square, sum_of(dq.shape))
            plgpu.barrier_arrive(k_free.at[k_slot_before])
            return dq, slopes_of(p, bent, dp, delta, j), delta

        def copy_slopes(j, _):
            keys = pl.ds(j * c.block_k, c.block_k)
            plgpu.copy_smem_to_gmem(
                slopes_smem.at[me], slopes_ref.at[batch, head, rows, keys]
            )

        def store_slopes(ds, j):
            slopes_smem.at[me][...] = ds.astype(slopes_ref.dtype)
            plgpu.commit_smem()
            copy_slopes(j, None)

        if slopes_ref is not None:  # blocks that no loop visits
            slopes_smem.at[me][...] = zeros((ROWS, c.block_k)).astype(slopes_ref.dtype)
            plgpu.commit_smem()
            end = -(-c.s // c.block_k)
            lax.fori_loop(0, part[0], copy_slopes, None)
            lax.fori_loop(part[3], end, copy_slopes, None)

        def skip(j, _):
            k_slot, v_slot = slot_at(j)
            keys_and_values(j)
            plgpu.barrier_arrive(k_free.at[k_slot])
            if v_free is not None:
                plgpu.barrier_arrive(v_free.at[v_slot])

        def walk_behind(dq, begins, ends):
            start, whole, whole_end, stop = part
            start = lax.min(start, last - 1)  # one at least
            stop = lax.max(stop, start + 1)
            lax.fori_loop(first, start, skip, None)
            others = in_order(start + 1, whole, whole_end, stop)
            carry = dq, *first_slopes(start, begins or ends)
            dq, ds, _ = walk(step_behind, carry, others, begins, ends)
            if dq_smem is not None:
                plgpu.barrier_arrive(q_free.at[me])
            dq = add(stop - 1, dq, ds)
            lax.fori_loop(stop, last, skip, None)
            return dq

        ragged = lengths_ref is not None or c.s % c.block_k != 0
        bounded = bounds_ref is not None
        begins, ends = c.window is not None or bounded, c.causal or ragged or bounded
        dq = zeros((ROWS, c.h))
        if c.h + c.hv > NARROW:
            dq = walk_part(step, skip, dq, blocks, part, begins=begins, ends=ends)
        else:
            dq = walk_behind(dq, begins, ends)
        staged = q_smem if dq_smem is None else dq_smem
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(dq * dscale(c), staged.at[me], dq_ref.at[batch, rows, head])
        if dq_smem is None:
            plgpu.barrier_arrive(q_free.at[me])
        return at + last - first

    @pl.when(me < CONSUMERS)
    def differentiate():
        plgpu.set_max_registers(240, action="increase")
        for ring in free:
            for slot in range(ring.shape[0]):
                plgpu.barrier_arrive(ring.at[slot])
        plgpu.barrier_arrive(q_free.at[me])
        walk_tiles(differentiate_tile)
        plgpu.wait_smem_to_gmem(0)
