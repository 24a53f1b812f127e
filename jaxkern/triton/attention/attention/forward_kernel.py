"""Attention of many queries: out and lse of a block of queries of one head.

A program walks over the blocks of keys that its queries see, as in FlashAttention-2
(https://arxiv.org/abs/2307.08691, alg. 1): it keeps the running maximum `top` and sum
`total` of each row, and rescales what it has by exp2(top - higher). It reads q once,
k and v of the blocks that it visits, and writes out and lse once.
"""

from jaxkern.gpu.attention.head_rows import (
    factor,
    load_rows,
    load_turned,
    place,
    store_rows,
    tail_of,
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
def products(
    q,
    q_left,
    k_at,
    k_left,
    C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """q k^T of a block of keys; by pieces of the head dim q is where the rows lie."""
    if PIECE == C.PADDED_H:
        k = load_rows(k_at, k_left, C.K_STRIDE, C.H, BLOCK_K, PIECE, MASKED)
        qk = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
    else:
        qk = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        H: tl.constexpr = C.H
        for d in tl.static_range(0, H, PIECE):
            rows = load_rows(q + d, q_left, C.Q_STRIDE, H - d, BLOCK_Q, PIECE, True)
            k = load_rows(k_at + d, k_left, C.K_STRIDE, H - d, BLOCK_K, PIECE, MASKED)
            qk = tl.dot(rows, tl.trans(k), qk, input_precision=C.PRECISION)
    return qk


@jit
def forward_blocks(
    sums,
    q,
    q_left,
    q_ids,
    keys,
    turned_v_at,
    pairs,
    first,
    last,
    kv_ids_at,
    mask_at,
    bias_at,
    C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
    MASKED: tl.constexpr,
):
    FACTOR: tl.constexpr = C.SCALE if C.FOLDED else 1.0
    top, total, acc = sums
    k_at, v_at = keys
    rows, offset, length = pairs
    for block in range(first, last):
        start = block * BLOCK_K
        skip = start.to(tl.int64)
        qk = products(
            q,
            q_left,
            k_at + skip * C.K_STRIDE,
            length - start,
            C,
            BLOCK_Q,
            BLOCK_K,
            PIECE,
            MASKED,
        )
        columns = (start + tl.arange(0, BLOCK_K))[None, :]
        z, _ = logits(qk, rows, columns, length, bias_at, C)
        if MASKED:
            seen = visible(rows, columns, offset, length, q_ids, kv_ids_at, mask_at, C)
            z = tl.where(seen, z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 1) * FACTOR)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(z * FACTOR - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        if turned_v_at is not None:
            v = load_turned(
                turned_v_at + start,
                length - start,
                C.PADDED_S,
                C.HV,
                BLOCK_K,
                C.PADDED_HV,
                MASKED,
            )
        else:
            v = load_rows(
                v_at + skip * C.V_STRIDE,
                length - start,
                C.V_STRIDE,
                C.HV,
                BLOCK_K,
                C.PADDED_HV,
                MASKED,
            )
        acc = tl.dot(factor(p, v, C), v, acc, input_precision=C.PRECISION)
        top = higher
    return top, total, acc


@jit
def flash_attention_kernel(
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
    sinks_ptr,
    turned_v_ptr,
    out_ptr,
    lse_ptr,
    tail_ptr,
    C: tl.constexpr,
    SECTION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
):
    """out, lse and what rounding takes from out, of BLOCK_Q queries of one head."""
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
    turned_v_at = None
    if turned_v_ptr is not None:
        turned_v_at = (
            turned_v_ptr + (batch * C.HEADS + kv_head).to(tl.int64) * C.HV * C.PADDED_S
        )
    q, q_left = q_ptr + (q_row * C.N + n) * C.H, C.T - row
    if PIECE == C.PADDED_H:
        q = load_rows(q, q_left, C.Q_STRIDE, C.H, BLOCK_Q, PIECE, True)
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
    PADDED_HV: tl.constexpr = C.PADDED_HV
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, PADDED_HV], tl.float32)
    for part in tl.static_range(3):
        if EXISTS[part]:
            top, total, acc = forward_blocks(
                (top, total, acc),
                q,
                q_left,
                q_ids,
                (k_at, v_at),
                turned_v_at,
                (rows, offset, length),
                edges[part],
                edges[part + 1],
                kv_ids_at,
                mask_at,
                bias_at,
                C,
                BLOCK_Q,
                BLOCK_K,
                PIECE,
                part != 1,
            )
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + n).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        total = total * fade + tl.exp2(sink - base)
        acc = acc * fade[:, None]
        top = higher
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out_at = out_ptr + (q_row * C.N + n) * C.HV
    out = acc / total[:, None]
    store_rows(out_at, out, C.T - row, C.OUT_STRIDE, C.HV, BLOCK_Q, C.PADDED_HV)
    if tail_ptr is not None:
        tail = tail_of(out, out_ptr.dtype.element_ty)
        tail_at = tail_ptr + (q_row * C.N + n) * C.HV
        store_rows(tail_at, tail, C.T - row, C.OUT_STRIDE, C.HV, BLOCK_Q, C.PADDED_HV)
    lse = tl.where(empty, -float("inf"), (top + tl.log2(total)) * 0.6931471805599453)
    r = tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + q_row * C.N + n + r * C.N, lse, r < C.T - row)
