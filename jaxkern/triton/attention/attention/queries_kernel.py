"""Gradients of attention: dq of a block of queries of one head.

    dS = p * (dout v^T - delta);  dq = dS k * scale

A program holds its queries and dout, and walks over the blocks of keys that they see:
it reads k and v of these, and writes dq once. dS, [b n t s], is written only where it
is asked for: it is the gradient of a bias.
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
    key_ranges,
    keys_of_head,
    logits,
    loops_over_keys,
    of_head,
    position_and_length,
    visible,
)


@jit
def query_blocks(
    dq,
    queries,
    q_ids,
    keys,
    turned_k_at,
    pairs,
    first,
    last,
    kv_ids_at,
    mask_at,
    bias_at,
    slopes_at,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds to dq, without its scale, and writes dS where it is wanted."""
    FACTOR: tl.constexpr = C.SCALE if C.FOLDED else 1.0
    q, dout, lse2, delta = queries
    k_at, v_at = keys
    rows, offset, length = pairs
    for block in range(first, last):
        start = block * BLOCK_K
        skip = start.to(tl.int64)
        left = length - start
        k = load_rows(
            k_at + skip * C.K_STRIDE, left, C.K_STRIDE, C.H, BLOCK_K, C.PADDED_H, MASKED
        )
        v = load_rows(
            v_at + skip * C.V_STRIDE,
            left,
            C.V_STRIDE,
            C.HV,
            BLOCK_K,
            C.PADDED_HV,
            MASKED,
        )
        qk = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
        columns = (start + tl.arange(0, BLOCK_K))[None, :]
        z, bent = logits(qk, rows, columns, length, bias_at, C)
        if MASKED:
            seen = visible(rows, columns, offset, length, q_ids, kv_ids_at, mask_at, C)
            z = tl.where(seen, z, -float("inf"))
        p = tl.exp2(z * FACTOR - lse2[:, None])
        dp = tl.dot(dout, tl.trans(v), input_precision=C.PRECISION)
        ds = p * (dp - delta[:, None])
        if slopes_at is not None:
            at = slopes_at + rows.to(tl.int64) * C.S + columns
            slopes = ds.to(slopes_at.dtype.element_ty)
            tl.store(at, slopes, (rows < C.T) & (columns < C.S))
        if C.SOFTCAP is not None:
            ds *= 1.0 - bent * bent
        if turned_k_at is not None:
            k = load_turned(
                turned_k_at + start, left, C.PADDED_S, C.H, BLOCK_K, C.PADDED_H, MASKED
            )
        dq = tl.dot(factor(ds, k, C), k, dq, input_precision=C.PRECISION)
    return dq


@jit
def flash_attention_bwd_queries_kernel(
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
    turned_k_ptr,
    dq_ptr,
    slopes_ptr,
    C: tl.constexpr,
    SECTION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dq of BLOCK_Q queries of one head, and dS where slopes_ptr is given."""
    HIDDEN: tl.constexpr = mask_ptr is not None
    BIASED: tl.constexpr = bias_ptr is not None
    BLOCKS: tl.constexpr = (C.T + BLOCK_Q - 1) // BLOCK_Q
    block, head = place(C.B * C.N, BLOCKS, SECTION, C.CAUSAL)
    batch, n = head // C.N, head % C.N
    kv_head = n // C.GROUP
    offset, length = position_and_length(q_offset_ptr, kv_lengths_ptr, batch, C)
    row = block * BLOCK_Q
    rows = (row + tl.arange(0, BLOCK_Q))[:, None]
    q_row = batch.to(tl.int64) * C.T + row
    kv_row = batch.to(tl.int64) * C.S
    k_at, v_at = keys_of_head(k_ptr, v_ptr, kv_row, kv_head, C)
    turned_k_at = None
    if turned_k_ptr is not None:
        turned_k_at = (
            turned_k_ptr + (batch * C.HEADS + kv_head).to(tl.int64) * C.H * C.PADDED_S
        )
    left = C.T - row
    q_at = q_ptr + (q_row * C.N + n) * C.H
    dout_at = dout_ptr + (q_row * C.N + n) * C.HV
    q = load_rows(q_at, left, C.Q_STRIDE, C.H, BLOCK_Q, C.PADDED_H, True)
    dout = load_rows(dout_at, left, C.OUT_STRIDE, C.HV, BLOCK_Q, C.PADDED_HV, True)
    by_head = (batch * C.N + n).to(tl.int64) * C.PADDED_T + row
    lse2 = tl.load(lse2_ptr + by_head + tl.arange(0, BLOCK_Q))
    delta = tl.load(delta_ptr + by_head + tl.arange(0, BLOCK_Q))
    q_ids, kv_ids_at = None, None
    if q_ids_ptr is not None:
        q_ids = tl.load(q_ids_ptr + batch.to(tl.int64) * C.T + rows, rows < C.T, 0)
        kv_ids_at = kv_ids_ptr + kv_row
    mask_at = of_head(mask_ptr, batch, n, C.MASK_B, C.MASK_N) if HIDDEN else None
    bias_at = of_head(bias_ptr, batch, n, C.BIAS_B, C.BIAS_N) if BIASED else None
    at_bounds = batch * BLOCKS + block
    edges = key_ranges(
        row, offset, length, mask_ptr, bounds_ptr, at_bounds, C, BLOCK_Q, BLOCK_K
    )
    EXISTS: tl.constexpr = loops_over_keys(
        C, BLOCK_K, bounds_ptr is not None, kv_lengths_ptr is not None, HIDDEN
    )
    slopes_at = None
    if slopes_ptr is not None:
        slopes_at = slopes_ptr + head.to(tl.int64) * C.T * C.S
        blocks_of_keys = (C.S + BLOCK_K - 1) // BLOCK_K
        for block_k in range(0, blocks_of_keys):
            if (block_k < edges[0]) | (block_k >= edges[3]):  # no loop visits it
                columns = (block_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
                at = slopes_at + rows.to(tl.int64) * C.S + columns
                tl.store(at, 0.0, (rows < C.T) & (columns < C.S))
    PADDED_H: tl.constexpr = C.PADDED_H
    dq = tl.zeros([BLOCK_Q, PADDED_H], tl.float32)
    for part in tl.static_range(3):
        if EXISTS[part]:
            dq = query_blocks(
                dq,
                (q, dout, lse2, delta),
                q_ids,
                (k_at, v_at),
                turned_k_at,
                (rows, offset, length),
                edges[part],
                edges[part + 1],
                kv_ids_at,
                mask_at,
                bias_at,
                slopes_at,
                C,
                BLOCK_K,
                part != 1,
            )
    dq *= C.DSCALE
    dq_at = dq_ptr + (q_row * C.N + n) * C.H
    store_rows(dq_at, dq, left, C.Q_STRIDE, C.H, BLOCK_Q, C.PADDED_H)
