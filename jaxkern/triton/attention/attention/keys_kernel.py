"""Gradients of attention: dk and dv of a block of keys of one key head.

    dv = p^T dout;  dk = (p * (dout v^T - delta))^T q * scale

A program holds its keys and values, and walks over the blocks of queries that see them,
through all heads of the group: no atomics, so it is deterministic. It reads q and dout
of the blocks that it visits, and writes dk and dv once.

Triton 3.4 to 3.7 miscompiles a transposed product that feeds another on Hopper, so the
kernel computes k q^T and v dout^T as such: all scores are [keys, queries].
"""

from jaxkern.gpu.attention.head_rows import (
    factor,
    load_rows,
    load_turned,
    place,
    store_rows,
)
from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.attention.attention.pairs import (
    keys_of_head,
    logits,
    of_head,
    position_and_length,
    query_ranges,
    visible,
)


@jit
def key_blocks(
    dk,
    dv,
    k,
    v,
    queries,
    turned_q_at,
    turned_dout_at,
    pairs,
    first,
    last,
    q_ids_at,
    kv_ids_at,
    mask_at,
    bias_at,
    C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    WANT_K: tl.constexpr,
    WANT_V: tl.constexpr,
):
    """Adds to dk (without its scale) and dv; all products are [keys, queries]."""
    FACTOR: tl.constexpr = C.SCALE if C.FOLDED else 1.0
    q_at, dout_at, lse2_at, delta_at = queries
    columns, offset, length = pairs
    for block in range(first, last):
        start = block * BLOCK_Q
        skip = start.to(tl.int64)
        within = start + tl.arange(0, BLOCK_Q)
        rows = within[None, :]
        q = load_rows(
            q_at + skip * C.Q_STRIDE,
            C.T - start,
            C.Q_STRIDE,
            C.H,
            BLOCK_Q,
            C.PADDED_H,
            MASKED,
        )
        lse2 = tl.load(lse2_at + within)
        # what is subtracted starts the sum, so that no registers hold it
        minus_lse = tl.broadcast_to(-lse2[None, :], [BLOCK_K, BLOCK_Q])
        if C.FOLDED:
            qk = tl.dot(k, tl.trans(q), minus_lse / FACTOR, input_precision=C.PRECISION)
        else:
            qk = tl.dot(k, tl.trans(q), input_precision=C.PRECISION)
        z, bent = logits(qk, rows, columns, length, bias_at, C)
        if MASKED:
            q_ids = None
            if q_ids_at is not None:
                q_ids = tl.load(q_ids_at + rows, rows < C.T, 0)
            seen = visible(rows, columns, offset, length, q_ids, kv_ids_at, mask_at, C)
            z = tl.where(seen, z, -float("inf"))
        p = tl.exp2(z * FACTOR if C.FOLDED else z + minus_lse)
        dout = load_rows(
            dout_at + skip * C.OUT_STRIDE,
            C.T - start,
            C.OUT_STRIDE,
            C.HV,
            BLOCK_Q,
            C.PADDED_HV,
            MASKED,
        )
        if WANT_V:
            by_rows = dout
            if turned_dout_at is not None:
                by_rows = load_turned(
                    turned_dout_at + start,
                    C.T - start,
                    C.PADDED_T,
                    C.HV,
                    BLOCK_Q,
                    C.PADDED_HV,
                    False,
                )
            dv = tl.dot(factor(p, dout, C), by_rows, dv, input_precision=C.PRECISION)
        if WANT_K:
            delta = tl.load(delta_at + within)
            minus_delta = tl.broadcast_to(-delta[None, :], [BLOCK_K, BLOCK_Q])
            dp = tl.dot(v, tl.trans(dout), minus_delta, input_precision=C.PRECISION)
            ds = p * dp
            if C.SOFTCAP is not None:
                ds *= 1.0 - bent * bent
            if turned_q_at is not None:
                q = load_turned(
                    turned_q_at + start,
                    C.T - start,
                    C.PADDED_T,
                    C.H,
                    BLOCK_Q,
                    C.PADDED_H,
                    False,
                )
            dk = tl.dot(factor(ds, q, C), q, dk, input_precision=C.PRECISION)
    return dk, dv


@jit
def flash_attention_bwd_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    mask_ptr,
    q_ids_ptr,
    kv_ids_ptr,
    bounds_ptr,
    kv_lengths_ptr,
    q_offset_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    turned_q_ptr,
    turned_dout_ptr,
    dk_ptr,
    dv_ptr,
    C: tl.constexpr,
    SECTION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dk and dv of BLOCK_K keys of one key head, summed over its group, if given."""
    HIDDEN: tl.constexpr = mask_ptr is not None
    BIASED: tl.constexpr = bias_ptr is not None
    RAGGED: tl.constexpr = (
        C.S % BLOCK_K != 0
        or C.T % BLOCK_Q != 0
        or C.WINDOW is not None
        or kv_lengths_ptr is not None
        or bounds_ptr is not None
        or HIDDEN
    )
    BLOCKS: tl.constexpr = (C.S + BLOCK_K - 1) // BLOCK_K
    block, head = place(C.B * C.HEADS, BLOCKS, SECTION, False)
    batch, kv_head = head // C.HEADS, head % C.HEADS
    offset, length = position_and_length(q_offset_ptr, kv_lengths_ptr, batch, C)
    column = block * BLOCK_K
    columns = (column + tl.arange(0, BLOCK_K))[:, None]
    kv_row = batch.to(tl.int64) * C.S + column
    k_at, v_at = keys_of_head(k_ptr, v_ptr, kv_row, kv_head, C)
    left = length - column  # what lies behind the length may be NaN
    k = load_rows(k_at, left, C.K_STRIDE, C.H, BLOCK_K, C.PADDED_H, True)
    v = load_rows(v_at, left, C.V_STRIDE, C.HV, BLOCK_K, C.PADDED_HV, True)
    q_row = batch.to(tl.int64) * C.T
    q_ids_at, kv_ids_at = None, None
    if q_ids_ptr is not None:
        q_ids_at = q_ids_ptr + q_row
        kv_ids_at = kv_ids_ptr + batch.to(tl.int64) * C.S
    at_bounds = batch * BLOCKS + block
    edges = query_ranges(
        column, offset, length, mask_ptr, bounds_ptr, at_bounds, C, BLOCK_Q, BLOCK_K
    )
    EXISTS: tl.constexpr = (
        C.CAUSAL or bounds_ptr is not None,
        not HIDDEN,
        RAGGED,
    )
    WANT_K: tl.constexpr = dk_ptr is not None
    WANT_V: tl.constexpr = dv_ptr is not None
    PADDED_H: tl.constexpr = C.PADDED_H if WANT_K else 1
    PADDED_HV: tl.constexpr = C.PADDED_HV if WANT_V else 1
    dk = tl.zeros([BLOCK_K, PADDED_H], tl.float32)
    dv = tl.zeros([BLOCK_K, PADDED_HV], tl.float32)
    for member in range(0, C.GROUP):
        n = kv_head * C.GROUP + member
        mask_at = of_head(mask_ptr, batch, n, C.MASK_B, C.MASK_N) if HIDDEN else None
        bias_at = of_head(bias_ptr, batch, n, C.BIAS_B, C.BIAS_N) if BIASED else None
        by_head = (batch * C.N + n).to(tl.int64) * C.PADDED_T
        turned_q_at, turned_dout_at = None, None
        if turned_q_ptr is not None:
            turned_q_at = turned_q_ptr + by_head * C.H
        if turned_dout_ptr is not None:
            turned_dout_at = turned_dout_ptr + by_head * C.HV
        for part in tl.static_range(3):
            if EXISTS[part]:
                dk, dv = key_blocks(
                    dk,
                    dv,
                    k,
                    v,
                    (
                        q_ptr + (q_row * C.N + n) * C.H,
                        dout_ptr + (q_row * C.N + n) * C.HV,
                        lse2_ptr + by_head,
                        delta_ptr + by_head,
                    ),
                    turned_q_at,
                    turned_dout_at,
                    (columns, offset, length),
                    edges[part],
                    edges[part + 1],
                    q_ids_at,
                    kv_ids_at,
                    mask_at,
                    bias_at,
                    C,
                    BLOCK_Q,
                    BLOCK_K,
                    part != 1,
                    WANT_K,
                    WANT_V,
                )
    kv_row = kv_row * C.HEADS + kv_head
    left = C.S - column
    if WANT_K:
        dk *= C.DSCALE
        dk_at = dk_ptr + kv_row * C.H
        store_rows(dk_at, dk, left, C.K_STRIDE, C.H, BLOCK_K, C.PADDED_H)
    if WANT_V:
        dv_at = dv_ptr + kv_row * C.HV
        store_rows(dv_at, dv, left, C.V_STRIDE, C.HV, BLOCK_K, C.PADDED_HV)
