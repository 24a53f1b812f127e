"""Attention of many queries, forward and backward, without a matrix of scores.

A program of the forward pass holds a block of queries of one head and walks over the
blocks of keys that they see, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691):
it keeps the running maximum and sum of each row. Blocks that causal, window, lengths
or segments hide entirely are never visited, and those that they show entirely are not
masked. The backward pass is three launches: rows (delta and lse, laid out by head),
keys (dk and dv: a block of keys walks over its queries, through all heads of its group)
and queries (dq). No atomics, so it is deterministic.

Triton 3.4 to 3.7 miscompiles a transposed product that feeds another on Hopper, so the
kernel of the keys computes k q^T and v dout^T as such.

Exponentials are of base 2, with the scale folded into their argument. q, k, v, out and
their gradients stay in [b t n h]; beside them only lse and delta are written, O(t).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.primitives.attention.attention import attention_bwd_reference
from jaxkern.triton.block_sizes import next_power_of_2, tuned
from jaxkern.triton.triton_call import (
    compute_capability,
    jit,
    like,
    sparse_call,
    tl,
    triton_call,
)
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

MAX_HEAD_DIM = 256
FEW_SCORES = 2**17  # the latency of the tiles is longer than XLA's launches
FEW_QUERIES = 8  # up to here one reads the keys, and the arithmetic does not matter
LOG2_E = 1.4426950408889634
CACHED_BYTES = 2**25  # of the L2 cache, for the keys and values of one section
MAX_SLOPES_BYTES = 2**32  # of dS, where it is only summed
PADDING = 128  # of the rows of lse and delta; a multiple of every BLOCK_Q


def slower(query: Any, key: Any, **_: Any) -> str | None:
    b, t, n, _ = query.shape
    scores = b * t * n * key.shape[1]
    return f"{scores} scores are few" if scores <= FEW_SCORES else None


def unsupported(
    query: Any, key: Any, value: Any, scale: float, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    b, t, n, h = query.shape
    s, hv = value.shape[1], value.shape[3]
    if t <= FEW_QUERIES:
        return f"{t} queries are no more than {FEW_QUERIES}: reading the keys decides"
    if max(h, hv) > MAX_HEAD_DIM:
        return f"head dims {h} and {hv} are above {MAX_HEAD_DIM}"
    if not b * n * h * hv * s:
        return "an operand is empty"
    if not query.dtype == key.dtype == value.dtype:
        names = [x.dtype.name for x in (query, key, value)]
        return f"query, key and value have the dtypes {', '.join(names)}"
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"`query` is {query.dtype.name}"
    return unsupported_anywhere(query=query, bias=rest.get("bias"))


# Sizes.


def forward_sizes(width: int, dtype: Any) -> dict[str, int]:
    """Sizes by the wider head dim, as a power of 2."""
    hopper = compute_capability() >= 90
    if dtype == jnp.float32:  # each product is three
        return dict(BLOCK_Q=64 if width < 256 else 32, BLOCK_K=32, warps=4, stages=1)
    if width <= 64:
        return dict(BLOCK_Q=128, BLOCK_K=128 if hopper else 64, warps=4, stages=3)
    if width == 128:
        return dict(BLOCK_Q=128, BLOCK_K=128 if hopper else 64, warps=8, stages=2)
    return dict(BLOCK_Q=128, BLOCK_K=64 if hopper else 32, warps=8, stages=2)


def key_sizes(width: int, dtype: Any) -> dict[str, int]:
    hopper = compute_capability() >= 90
    if dtype == jnp.float32:
        return dict(BLOCK_Q=32, BLOCK_K=32, warps=4 if width < 256 else 8, stages=1)
    if width <= 64:
        return dict(BLOCK_Q=64, BLOCK_K=128, warps=8 if hopper else 4, stages=2)
    if width == 128:
        return dict(BLOCK_Q=64 if hopper else 32, BLOCK_K=128, warps=8, stages=2)
    return dict(BLOCK_Q=64 if hopper else 32, BLOCK_K=64, warps=8, stages=1)


def query_sizes(width: int, dtype: Any) -> dict[str, int]:
    hopper = compute_capability() >= 90
    if dtype == jnp.float32:
        return dict(BLOCK_Q=32, BLOCK_K=32, warps=4 if width < 256 else 8, stages=1)
    if width <= 64:
        return dict(BLOCK_Q=128, BLOCK_K=64, warps=8 if hopper else 4, stages=2)
    if width == 128:
        return dict(BLOCK_Q=128, BLOCK_K=64 if hopper else 32, warps=8, stages=2)
    return dict(BLOCK_Q=128 if hopper else 64, BLOCK_K=32, warps=8, stages=2)


def sizes_of(kernel: str, rule: Any, given: dict[str, Any]) -> dict[str, int]:
    query, value = given["q_ptr"], given["v_ptr"]
    width = next_power_of_2(max(query.shape[3], value.shape[3]))
    found = rule(width, query.dtype)
    found["num_warps"], found["num_stages"] = found.pop("warps"), found.pop("stages")
    found = tuned(kernel, width, query.dtype, found)
    if given["mask_ptr"] is not None or given["bias_ptr"] is not None:
        # a value for each pair takes registers and shared memory beside k and v
        found["num_stages"] = min(found["num_stages"], 2 if width <= 128 else 1)
        if rule is forward_sizes and query.dtype != jnp.float32:
            wide = width <= 128 and compute_capability() >= 90
            found["BLOCK_K"] = min(found["BLOCK_K"], 64 if wide else 32)
            found["num_warps"] = 8
    return found


# What the kernels share.


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a problem fixes for all of its kernels; `C` in them.

    Attributes:
      B, T, S, N, HEADS, GROUP, H, HV: sizes; N = HEADS * GROUP.
      PADDED_T, PADDED_H, PADDED_HV: what the kernels hold of T, H, HV.
      Q_STRIDE, K_STRIDE, V_STRIDE, OUT_STRIDE: from one row to the next.
      MASK_B, ..., BIAS_S: strides of mask and bias.
      SCALE: of q k^T, with log2 e where no cap comes after it.
      DSCALE: of dq and dk.
      FOLDED: SCALE is applied as late as in the exponent.
      SOFTCAP, CAUSAL, WINDOW: options.
    """

    B: int
    T: int
    S: int
    N: int
    HEADS: int
    GROUP: int
    H: int
    HV: int
    PADDED_T: int
    PADDED_H: int
    PADDED_HV: int
    Q_STRIDE: int
    K_STRIDE: int
    V_STRIDE: int
    OUT_STRIDE: int
    MASK_B: int
    MASK_N: int
    MASK_T: int
    MASK_S: int
    BIAS_B: int
    BIAS_N: int
    BIAS_T: int
    BIAS_S: int
    DSCALE: float
    SCALE: float
    SOFTCAP: float | None
    FOLDED: bool
    CAUSAL: bool
    WINDOW: int | None


@jit
def place(
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SECTION: tl.constexpr,
    LAST_FIRST: tl.constexpr,
):
    """(block, head) of this program: by sections of heads, the longest blocks first."""
    program = tl.program_id(0)
    section = program // (SECTION * BLOCKS)
    within = program % (SECTION * BLOCKS)
    present = tl.minimum(SECTION, HEADS - section * SECTION)
    block = within // present
    if LAST_FIRST:
        block = BLOCKS - 1 - block
    return block, section * SECTION + within % present


@jit
def load_rows(
    at,
    count,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows of WIDTH elements, 0 beyond WIDTH and, if MASKED, beyond count rows."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    pointers = at + row * STRIDE + column
    if MASKED and WIDTH != COLUMNS:
        x = tl.load(pointers, (row < count) & (column < WIDTH), 0.0)
    elif MASKED:
        x = tl.load(pointers, row < count, 0.0)
    elif WIDTH != COLUMNS:
        x = tl.load(pointers, column < WIDTH, 0.0)
    else:
        x = tl.load(pointers)
    return x


@jit
def store_rows(
    at,
    x,
    count,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < WIDTH)
    tl.store(at + row * STRIDE + column, x.to(at.dtype.element_ty), inside)


@jit
def position_and_length(q_offset_ptr, kv_lengths_ptr, batch, C: tl.constexpr):
    offset = C.S - C.T
    if q_offset_ptr is not None:
        offset = tl.load(q_offset_ptr + batch)
    length = C.S
    if kv_lengths_ptr is not None:
        length = tl.minimum(tl.load(kv_lengths_ptr + batch), C.S)
    return offset, length


@jit
def ranges(
    start, stop, whole_start, whole_stop, bounds_ptr, at_bounds, BLOCK: tl.constexpr
):
    """The blocks to visit: [first, last), of these [whole, whole_end) without a mask.

    From the rows that some pair, and that all pairs, may see.
    """
    first = tl.maximum(start, 0) // BLOCK
    last = (tl.maximum(stop, 0) + BLOCK - 1) // BLOCK
    whole = (tl.maximum(whole_start, 0) + BLOCK - 1) // BLOCK
    whole_end = tl.maximum(whole_stop, 0) // BLOCK
    if bounds_ptr is not None:
        first = tl.maximum(first, tl.load(bounds_ptr + at_bounds * 4))
        whole = tl.maximum(whole, tl.load(bounds_ptr + at_bounds * 4 + 1))
        whole_end = tl.minimum(whole_end, tl.load(bounds_ptr + at_bounds * 4 + 2))
        last = tl.minimum(last, tl.load(bounds_ptr + at_bounds * 4 + 3))
    whole = tl.minimum(tl.maximum(whole, first), last)
    whole_end = tl.maximum(tl.minimum(whole_end, last), whole)
    return first, whole, whole_end, last


@jit
def key_ranges(
    row,
    offset,
    length,
    bounds_ptr,
    at_bounds,
    C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The blocks of keys that the queries from `row` on see."""
    start, stop, whole_start, whole_stop = 0, length, 0, length
    position = row + offset
    if C.CAUSAL:
        stop = tl.minimum(length, position + BLOCK_Q)
        whole_stop = tl.minimum(length, position + 1)
    if C.WINDOW is not None:
        start = position - C.WINDOW + 1
        whole_start = position + BLOCK_Q - C.WINDOW
    return ranges(start, stop, whole_start, whole_stop, bounds_ptr, at_bounds, BLOCK_K)


@jit
def query_ranges(
    column,
    offset,
    length,
    bounds_ptr,
    at_bounds,
    C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The blocks of queries that see the keys from `column` on."""
    start, stop, whole_start, whole_stop = 0, C.T, 0, C.T
    if C.CAUSAL:
        start = column - offset
        whole_start = column + BLOCK_K - 1 - offset
    if C.WINDOW is not None:
        stop = tl.minimum(C.T, column + BLOCK_K - 1 + C.WINDOW - offset)
        whole_stop = tl.minimum(C.T, column + C.WINDOW - offset)
    stop = tl.where(column < length, stop, 0)
    whole_stop = tl.where(column + BLOCK_K <= length, whole_stop, 0)
    return ranges(start, stop, whole_start, whole_stop, bounds_ptr, at_bounds, BLOCK_Q)


@jit
def logits(
    qk,
    rows,
    columns,
    length,
    bias_at,
    C: tl.constexpr,
):
    """(log2 e times the scores, tanh of the cap); without the scale where folded."""
    z = qk
    bent = qk
    if C.SOFTCAP is not None:
        bent = 1.0 - 2.0 / (
            1.0 + tl.exp2(qk * (2.8853900817779268 * C.SCALE / C.SOFTCAP))
        )
        z = bent * (C.SOFTCAP * 1.4426950408889634)
    elif not C.FOLDED:
        z = qk * C.SCALE
    if bias_at is not None:
        at = bias_at + rows.to(tl.int64) * C.BIAS_T + columns * C.BIAS_S
        bias = tl.load(at, (rows < C.T) & (columns < length), 0.0)
        z += bias.to(tl.float32) * 1.4426950408889634
    return z, bent


@jit
def visible(
    rows,
    columns,
    offset,
    length,
    q_ids,
    kv_ids_at,
    mask_at,
    C: tl.constexpr,
):
    """Which pairs exist and see each other; rows and columns broadcast either way."""
    inside = (rows < C.T) & (columns < length)
    seen = inside
    behind = rows + offset - columns
    if C.CAUSAL:
        seen &= behind >= 0
    if C.WINDOW is not None:
        seen &= behind < C.WINDOW
    if kv_ids_at is not None:
        seen &= q_ids == tl.load(kv_ids_at + columns, columns < length, 0)
    if mask_at is not None:
        at = mask_at + rows.to(tl.int64) * C.MASK_T + columns * C.MASK_S
        seen &= tl.load(at, inside, 0).to(tl.int1)
    return seen


# Forward.


@jit
def forward_blocks(
    top,
    total,
    acc,
    q,
    q_ids,
    rows,
    offset,
    length,
    first,
    last,
    k_at,
    v_at,
    kv_ids_at,
    mask_at,
    bias_at,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    FACTOR: tl.constexpr = C.SCALE if C.FOLDED else 1.0
    for block in range(first, last):
        start = block * BLOCK_K
        skip = start.to(tl.int64)
        k = load_rows(
            k_at + skip * C.K_STRIDE,
            length - start,
            C.K_STRIDE,
            C.H,
            BLOCK_K,
            C.PADDED_H,
            MASKED,
        )
        qk = tl.dot(q, tl.trans(k), input_precision="tf32x3")
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
        v = load_rows(
            v_at + skip * C.V_STRIDE,
            length - start,
            C.V_STRIDE,
            C.HV,
            BLOCK_K,
            C.PADDED_HV,
            MASKED,
        )
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="tf32x3")
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
    out_ptr,
    lse_ptr,
    C: tl.constexpr,
    SECTION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out and lse of BLOCK_Q queries of one head."""
    RAGGED: tl.constexpr = (
        C.S % BLOCK_K != 0
        or kv_lengths_ptr is not None
        or bounds_ptr is not None
        or mask_ptr is not None
    )
    BLOCKS: tl.constexpr = (C.T + BLOCK_Q - 1) // BLOCK_Q
    block, head = place(C.B * C.N, BLOCKS, SECTION, C.CAUSAL)
    batch, n = head // C.N, head % C.N
    kv_head = n // C.GROUP
    offset, length = position_and_length(q_offset_ptr, kv_lengths_ptr, batch, C)
    row = block * BLOCK_Q
    rows = (row + tl.arange(0, BLOCK_Q))[:, None]
    q_row = batch.to(tl.int64) * C.T + row
    kv_row = batch.to(tl.int64) * C.S
    k_at = k_ptr + (kv_row * C.HEADS + kv_head) * C.H
    v_at = v_ptr + (kv_row * C.HEADS + kv_head) * C.HV
    q = load_rows(
        q_ptr + (q_row * C.N + n) * C.H,
        C.T - row,
        C.Q_STRIDE,
        C.H,
        BLOCK_Q,
        C.PADDED_H,
        True,
    )
    q_ids, kv_ids_at, mask_at, bias_at = None, None, None, None
    if q_ids_ptr is not None:
        q_ids = tl.load(q_ids_ptr + batch.to(tl.int64) * C.T + rows, rows < C.T, 0)
        kv_ids_at = kv_ids_ptr + kv_row
    if mask_ptr is not None:
        mask_at = mask_ptr + batch.to(tl.int64) * C.MASK_B + n.to(tl.int64) * C.MASK_N
    if bias_ptr is not None:
        bias_at = bias_ptr + batch.to(tl.int64) * C.BIAS_B + n.to(tl.int64) * C.BIAS_N
    at_bounds = batch * BLOCKS + block
    first, whole, whole_end, last = key_ranges(
        row, offset, length, bounds_ptr, at_bounds, C, BLOCK_Q, BLOCK_K
    )
    if mask_ptr is not None:
        whole, whole_end = first, first
    PADDED_HV: tl.constexpr = C.PADDED_HV
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, PADDED_HV], tl.float32)
    # the masked blocks before the whole ones, the whole ones, the masked ones behind
    for part in tl.static_range(3):
        begin = first if part == 0 else whole if part == 1 else whole_end
        end = whole if part == 0 else whole_end if part == 1 else last
        exists = (
            C.WINDOW is not None or bounds_ptr is not None
            if part == 0
            else mask_ptr is None
            if part == 1
            else C.CAUSAL or RAGGED
        )
        if exists:
            top, total, acc = forward_blocks(
                top,
                total,
                acc,
                q,
                q_ids,
                rows,
                offset,
                length,
                begin,
                end,
                k_at,
                v_at,
                kv_ids_at,
                mask_at,
                bias_at,
                C,
                BLOCK_K,
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
    lse = tl.where(empty, -float("inf"), (top + tl.log2(total)) * 0.6931471805599453)
    r = tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + q_row * C.N + n + r * C.N, lse, r < C.T - row)


# Backward: rows, keys, queries.


@jit
def flash_attention_bwd_rows_kernel(
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    T: tl.constexpr,
    PADDED_T: tl.constexpr,
    N: tl.constexpr,
    HV: tl.constexpr,
    PADDED_HV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """rowsum(out dout) - dlse; log2 e lse, or inf where p is to be 0. Both [b n t]."""
    row = tl.program_id(0) * ROWS
    n = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = (batch * T + row) * N + n
    out = load_rows(out_ptr + first * HV, T - row, N * HV, HV, ROWS, PADDED_HV, True)
    dout = load_rows(dout_ptr + first * HV, T - row, N * HV, HV, ROWS, PADDED_HV, True)
    r = tl.arange(0, ROWS)
    inside = r < T - row
    lse = tl.load(lse_ptr + first + r * N, inside, -float("inf"))
    dlse = tl.load(dlse_ptr + first + r * N, inside, 0.0)
    empty = lse == -float("inf")
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = (batch * N + n) * PADDED_T + row + r
    tl.store(delta_ptr + at, delta - tl.where(empty, 0.0, dlse))
    lse2 = tl.where(empty, float("inf"), lse * 1.4426950408889634)
    tl.store(lse2_ptr + at, lse2)


@jit
def key_blocks(
    dk,
    dv,
    k,
    v,
    columns,
    offset,
    length,
    first,
    last,
    q_at,
    dout_at,
    lse2_at,
    delta_at,
    q_ids_at,
    kv_ids_at,
    mask_at,
    bias_at,
    C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds to dk (without its scale) and dv; all products are [keys, queries]."""
    FACTOR: tl.constexpr = C.SCALE if C.FOLDED else 1.0
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
            qk = tl.dot(k, tl.trans(q), minus_lse / FACTOR, input_precision="tf32x3")
        else:
            qk = tl.dot(k, tl.trans(q), input_precision="tf32x3")
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
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="tf32x3")
        delta = tl.load(delta_at + within)
        minus_delta = tl.broadcast_to(-delta[None, :], [BLOCK_K, BLOCK_Q])
        ds = p * tl.dot(v, tl.trans(dout), minus_delta, input_precision="tf32x3")
        if C.SOFTCAP is not None:
            ds *= 1.0 - bent * bent
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="tf32x3")
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
    dk_ptr,
    dv_ptr,
    C: tl.constexpr,
    SECTION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dk and dv of BLOCK_K keys of one key head, summed over the heads of its group."""
    RAGGED: tl.constexpr = (
        C.S % BLOCK_K != 0
        or C.T % BLOCK_Q != 0
        or C.WINDOW is not None
        or kv_lengths_ptr is not None
        or bounds_ptr is not None
        or mask_ptr is not None
    )
    BLOCKS: tl.constexpr = (C.S + BLOCK_K - 1) // BLOCK_K
    block, head = place(C.B * C.HEADS, BLOCKS, SECTION, False)
    batch, kv_head = head // C.HEADS, head % C.HEADS
    offset, length = position_and_length(q_offset_ptr, kv_lengths_ptr, batch, C)
    column = block * BLOCK_K
    columns = (column + tl.arange(0, BLOCK_K))[:, None]
    kv_row = batch.to(tl.int64) * C.S + column
    k_at = k_ptr + (kv_row * C.HEADS + kv_head) * C.H
    v_at = v_ptr + (kv_row * C.HEADS + kv_head) * C.HV
    left = length - column  # what lies behind the length may be NaN
    k = load_rows(k_at, left, C.K_STRIDE, C.H, BLOCK_K, C.PADDED_H, True)
    v = load_rows(v_at, left, C.V_STRIDE, C.HV, BLOCK_K, C.PADDED_HV, True)
    q_row = batch.to(tl.int64) * C.T
    q_ids_at, kv_ids_at = None, None
    if q_ids_ptr is not None:
        q_ids_at = q_ids_ptr + q_row
        kv_ids_at = kv_ids_ptr + batch.to(tl.int64) * C.S
    at_bounds = batch * BLOCKS + block
    first, whole, whole_end, last = query_ranges(
        column,
        offset,
        length,
        bounds_ptr,
        at_bounds,
        C,
        BLOCK_Q,
        BLOCK_K,
    )
    if mask_ptr is not None:
        whole, whole_end = first, first
    PADDED_H: tl.constexpr = C.PADDED_H
    PADDED_HV: tl.constexpr = C.PADDED_HV
    dk = tl.zeros([BLOCK_K, PADDED_H], tl.float32)
    dv = tl.zeros([BLOCK_K, PADDED_HV], tl.float32)
    for member in range(0, C.GROUP):
        n = kv_head * C.GROUP + member
        mask_at, bias_at = None, None
        if mask_ptr is not None:
            mask_at = (
                mask_ptr + batch.to(tl.int64) * C.MASK_B + n.to(tl.int64) * C.MASK_N
            )
        if bias_ptr is not None:
            bias_at = (
                bias_ptr + batch.to(tl.int64) * C.BIAS_B + n.to(tl.int64) * C.BIAS_N
            )
        by_head = (batch * C.N + n).to(tl.int64) * C.PADDED_T
        for part in tl.static_range(3):
            begin = first if part == 0 else whole if part == 1 else whole_end
            end = whole if part == 0 else whole_end if part == 1 else last
            exists = (
                C.CAUSAL or bounds_ptr is not None
                if part == 0
                else mask_ptr is None
                if part == 1
                else RAGGED
            )
            if exists:
                dk, dv = key_blocks(
                    dk,
                    dv,
                    k,
                    v,
                    columns,
                    offset,
                    length,
                    begin,
                    end,
                    q_ptr + (q_row * C.N + n) * C.H,
                    dout_ptr + (q_row * C.N + n) * C.HV,
                    lse2_ptr + by_head,
                    delta_ptr + by_head,
                    q_ids_at,
                    kv_ids_at,
                    mask_at,
                    bias_at,
                    C,
                    BLOCK_Q,
                    BLOCK_K,
                    part != 1,
                )
    kv_row = kv_row * C.HEADS + kv_head
    dk *= C.DSCALE
    store_rows(
        dk_ptr + kv_row * C.H, dk, C.S - column, C.K_STRIDE, C.H, BLOCK_K, C.PADDED_H
    )
    store_rows(
        dv_ptr + kv_row * C.HV, dv, C.S - column, C.V_STRIDE, C.HV, BLOCK_K, C.PADDED_HV
    )


@jit
def query_blocks(
    dq,
    q,
    dout,
    lse2,
    delta,
    q_ids,
    rows,
    offset,
    length,
    first,
    last,
    k_at,
    v_at,
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
        qk = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        columns = (start + tl.arange(0, BLOCK_K))[None, :]
        z, bent = logits(qk, rows, columns, length, bias_at, C)
        if MASKED:
            seen = visible(rows, columns, offset, length, q_ids, kv_ids_at, mask_at, C)
            z = tl.where(seen, z, -float("inf"))
        p = tl.exp2(z * FACTOR - lse2[:, None])
        dp = tl.dot(dout, tl.trans(v), input_precision="tf32x3")
        ds = p * (dp - delta[:, None])
        if slopes_at is not None:
            at = slopes_at + rows.to(tl.int64) * C.S + columns
            slopes = ds.to(slopes_at.dtype.element_ty)
            tl.store(at, slopes, (rows < C.T) & (columns < C.S))
        if C.SOFTCAP is not None:
            ds *= 1.0 - bent * bent
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="tf32x3")
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
    dq_ptr,
    slopes_ptr,
    C: tl.constexpr,
    SECTION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dq of BLOCK_Q queries of one head, and dS where slopes_ptr is given."""
    RAGGED: tl.constexpr = (
        C.S % BLOCK_K != 0
        or kv_lengths_ptr is not None
        or bounds_ptr is not None
        or mask_ptr is not None
    )
    BLOCKS: tl.constexpr = (C.T + BLOCK_Q - 1) // BLOCK_Q
    block, head = place(C.B * C.N, BLOCKS, SECTION, C.CAUSAL)
    batch, n = head // C.N, head % C.N
    kv_head = n // C.GROUP
    offset, length = position_and_length(q_offset_ptr, kv_lengths_ptr, batch, C)
    row = block * BLOCK_Q
    rows = (row + tl.arange(0, BLOCK_Q))[:, None]
    q_row = batch.to(tl.int64) * C.T + row
    kv_row = batch.to(tl.int64) * C.S
    k_at = k_ptr + (kv_row * C.HEADS + kv_head) * C.H
    v_at = v_ptr + (kv_row * C.HEADS + kv_head) * C.HV
    left = C.T - row
    q_at = q_ptr + (q_row * C.N + n) * C.H
    dout_at = dout_ptr + (q_row * C.N + n) * C.HV
    q = load_rows(q_at, left, C.Q_STRIDE, C.H, BLOCK_Q, C.PADDED_H, True)
    dout = load_rows(dout_at, left, C.OUT_STRIDE, C.HV, BLOCK_Q, C.PADDED_HV, True)
    by_head = (batch * C.N + n).to(tl.int64) * C.PADDED_T + row
    lse2 = tl.load(lse2_ptr + by_head + tl.arange(0, BLOCK_Q))
    delta = tl.load(delta_ptr + by_head + tl.arange(0, BLOCK_Q))
    q_ids, kv_ids_at, mask_at, bias_at = None, None, None, None
    if q_ids_ptr is not None:
        q_ids = tl.load(q_ids_ptr + batch.to(tl.int64) * C.T + rows, rows < C.T, 0)
        kv_ids_at = kv_ids_ptr + kv_row
    if mask_ptr is not None:
        mask_at = mask_ptr + batch.to(tl.int64) * C.MASK_B + n.to(tl.int64) * C.MASK_N
    if bias_ptr is not None:
        bias_at = bias_ptr + batch.to(tl.int64) * C.BIAS_B + n.to(tl.int64) * C.BIAS_N
    at_bounds = batch * BLOCKS + block
    first, whole, whole_end, last = key_ranges(
        row, offset, length, bounds_ptr, at_bounds, C, BLOCK_Q, BLOCK_K
    )
    if mask_ptr is not None:
        whole, whole_end = first, first
    slopes_at = None
    if slopes_ptr is not None:
        slopes_at = slopes_ptr + head.to(tl.int64) * C.T * C.S
        blocks_of_keys = (C.S + BLOCK_K - 1) // BLOCK_K
        for block_k in range(0, blocks_of_keys):
            if (block_k < first) | (block_k >= last):  # no loop visits it
                columns = (block_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
                at = slopes_at + rows.to(tl.int64) * C.S + columns
                tl.store(at, 0.0, (rows < C.T) & (columns < C.S))
    PADDED_H: tl.constexpr = C.PADDED_H
    dq = tl.zeros([BLOCK_Q, PADDED_H], tl.float32)
    for part in tl.static_range(3):
        begin = first if part == 0 else whole if part == 1 else whole_end
        end = whole if part == 0 else whole_end if part == 1 else last
        exists = (
            C.WINDOW is not None or bounds_ptr is not None
            if part == 0
            else mask_ptr is None
            if part == 1
            else C.CAUSAL or RAGGED
        )
        if exists:
            dq = query_blocks(
                dq,
                q,
                dout,
                lse2,
                delta,
                q_ids,
                rows,
                offset,
                length,
                begin,
                end,
                k_at,
                v_at,
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


# Launchers.


def segment_bounds(
    row_ids: jax.Array, column_ids: jax.Array, block_rows: int, block_columns: int
) -> jax.Array:
    """[b, blocks of rows, 4]: the blocks of columns that `ranges` is to keep.

    Ids of packed sequences ascend, so that few blocks are kept; others work too.
    """

    def extremes(ids, block):
        short = -ids.shape[1] % block
        blocks = jnp.pad(ids, ((0, 0), (0, short)), mode="edge")
        blocks = blocks.reshape(ids.shape[0], -1, block)
        return blocks.min(-1), blocks.max(-1)

    low, high = (x[:, :, None] for x in extremes(row_ids, block_rows))
    from_low, from_high = (x[:, None] for x in extremes(column_ids, block_columns))
    meet = (low <= from_high) & (from_low <= high)
    return block_ranges(meet, (low == from_high) & (from_low == high))


def block_ranges(meet: jax.Array, same: jax.Array) -> jax.Array:
    """[b, rows, 4] of [b, rows, columns]: [first, last) holds all that meet.

    Of these all of [whole, whole_end) are the same.
    """
    at = jnp.arange(meet.shape[2], dtype=jnp.int32)
    blocks = jnp.int32(meet.shape[2])
    first = jnp.min(jnp.where(meet, at, blocks), -1)
    last = jnp.max(jnp.where(meet, at + 1, 0), -1)
    whole = jnp.min(jnp.where(same, at, blocks), -1)
    behind = ~same & (at >= whole[..., None])
    whole_end = jnp.min(jnp.where(behind, at, blocks), -1)
    return jnp.stack([first, whole, whole_end, last], -1)


def strides(x: jax.Array | None, name: str) -> dict[str, int]:
    """Of [#b #n #t #s]; 0 where a dim is broadcast."""
    if x is None:
        return {f"{name}_{dim}": 0 for dim in "BNTS"}
    _, n, t, s = x.shape
    steps = (n * t * s, t * s, s, 1)
    return {
        f"{name}_{dim}": 0 if size == 1 else step
        for dim, size, step in zip("BNTS", x.shape, steps, strict=True)
    }


def int32(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x.astype(jnp.int32)


def operands_and_constants(
    query,
    key,
    value,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    scale,
    causal,
    window,
    softcap,
) -> tuple[dict, Constants]:
    """What the kernels share, in the order of their parameters; bounds come later."""
    b, t, n, h = query.shape
    _, s, heads, hv = value.shape
    given = {
        "q_ptr": query,
        "k_ptr": key,
        "v_ptr": value,
        "bias_ptr": bias,
        "mask_ptr": mask,
        "q_ids_ptr": int32(q_segment_ids),
        "kv_ids_ptr": int32(kv_segment_ids),
        "bounds_ptr": None,
        "kv_lengths_ptr": int32(kv_lengths),
        "q_offset_ptr": int32(q_offset),
    }
    constants = Constants(
        B=b,
        T=t,
        S=s,
        N=n,
        HEADS=heads,
        GROUP=n // heads,
        H=h,
        HV=hv,
        PADDED_T=-(-t // PADDING) * PADDING,
        PADDED_H=max(16, next_power_of_2(h)),
        PADDED_HV=max(16, next_power_of_2(hv)),
        Q_STRIDE=n * h,
        K_STRIDE=heads * h,
        V_STRIDE=heads * hv,
        OUT_STRIDE=n * hv,
        **strides(mask, "MASK"),
        **strides(bias, "BIAS"),
        DSCALE=scale,
        SCALE=scale * (LOG2_E if softcap is None else 1.0),
        SOFTCAP=softcap,
        FOLDED=softcap is None and bias is None and scale > 0,
        CAUSAL=causal,
        # no position is as far as 2^30, and more could overflow
        WINDOW=None if window is None else min(window, 2**30),
    )
    return given, constants


def section(rows: int, elements: int, dtype: Any) -> int:
    """How many heads of so many rows the cache holds."""
    return max(1, CACHED_BYTES // (rows * elements * jnp.dtype(dtype).itemsize))


def attention_fwd(
    query,
    key,
    value,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    sinks,
    *,
    scale,
    causal,
    window,
    softcap,
):
    b, t, n, h = query.shape
    _, s, heads, hv = value.shape
    given, constants = operands_and_constants(
        query,
        key,
        value,
        bias,
        mask,
        q_segment_ids,
        kv_segment_ids,
        kv_lengths,
        q_offset,
        scale,
        causal,
        window,
        softcap,
    )
    sizes = sizes_of("flash_attention", forward_sizes, given)
    if q_segment_ids is not None:
        given["bounds_ptr"] = segment_bounds(
            given["q_ids_ptr"],
            given["kv_ids_ptr"],
            sizes["BLOCK_Q"],
            sizes["BLOCK_K"],
        )
    results = {
        "out_ptr": jax.ShapeDtypeStruct((b, t, n, hv), query.dtype),
        "lse_ptr": jax.ShapeDtypeStruct((b, t, n), jnp.float32),
    }
    return sparse_call(
        flash_attention_kernel,
        (-(-t // sizes["BLOCK_Q"]) * b * n,),
        given | {"sinks_ptr": sinks},
        results,
        {
            "C": constants,
            "SECTION": section(s, h + hv, key.dtype) * (n // heads),
            **sizes,
        },
    )


def with_bias_gradient(bwd: Callable[..., tuple]) -> Callable[..., tuple]:
    """`bwd`, whose fourth result is dS, [b n t s], if it is wanted, with dbias instead.

    No softmax sees what a bias adds to a whole row: dS of a row sums to what comes from
    the cotangent of lse and from the sinks. Where the bias is broadcast and dS would be
    too large, the reference sums it by rows.
    """

    @functools.wraps(bwd)
    def complete(*operands, wanted, scale, causal, window, softcap, **own):
        options = dict(scale=scale, causal=causal, window=window, softcap=softcap)
        bias: Any = operands[3]
        *want_others, want_bias, want_sinks = wanted
        if bias is None or not want_bias:
            wanted = *want_others, False, want_sinks
            return bwd(*operands, wanted=wanted, **options, **own)
        (b, t, n, _), s = operands[0].shape, operands[1].shape[1]
        of_rows = bias.shape[3] == 1
        size = b * n * t * s * bias.dtype.itemsize
        large = bias.shape != (b, n, t, s) and size > MAX_SLOPES_BYTES
        wanted = *want_others, not (of_rows or large), want_sinks
        slopes: Any
        dq, dk, dv, slopes, dsinks = bwd(*operands, wanted=wanted, **options, **own)
        if of_rows:
            slopes = sums_of_rows(*operands[-5:])
        elif large:
            slopes = attention_bwd_reference(*operands, **options)[3]
        axes = [i for i in range(4) if bias.shape[i] < slopes.shape[i]]
        if axes:
            slopes = jnp.sum(slopes, axes, dtype=jnp.float32, keepdims=True)
        return dq, dk, dv, slopes.astype(bias.dtype), dsinks

    return complete


def sums_of_rows(sinks, out, lse, dout, dlse) -> jax.Array:
    """dS summed over the keys, [b n t 1]: 0 but for the sinks' share and for dlse."""
    rows = dlse
    if sinks is not None:
        taken = jnp.exp(sinks.astype(jnp.float32) - lse)
        slope = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
        rows = rows + taken * slope
    rows = jnp.where(lse == -jnp.inf, 0.0, rows)
    return jnp.moveaxis(rows, 1, 2)[..., None]


@with_bias_gradient
def attention_bwd(
    query,
    key,
    value,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    sinks,
    out,
    lse,
    dout,
    dlse,
    *,
    scale,
    causal,
    window,
    softcap,
    wanted,
):
    b, t, n, h = query.shape
    _, s, heads, hv = value.shape
    want_q, want_k, want_v, want_slopes, want_sinks = wanted
    padded = -(-t // PADDING) * PADDING
    by_head = jax.ShapeDtypeStruct((b, n, padded), jnp.float32)
    rows = 64 if hv <= 128 else 32
    lse2, delta = triton_call(
        flash_attention_bwd_rows_kernel,
        out,
        lse,
        dout,
        dlse,
        out=[by_head, by_head],
        grid=(padded // rows, n, b),
        T=t,
        PADDED_T=padded,
        N=n,
        HV=hv,
        PADDED_HV=next_power_of_2(hv),
        ROWS=rows,
    )
    given, constants = operands_and_constants(
        query,
        key,
        value,
        bias,
        mask,
        q_segment_ids,
        kv_segment_ids,
        kv_lengths,
        q_offset,
        scale,
        causal,
        window,
        softcap,
    )
    given |= {"dout_ptr": dout, "lse2_ptr": lse2, "delta_ptr": delta}
    q_ids, kv_ids = given["q_ids_ptr"], given["kv_ids_ptr"]
    dq = dk = dv = slopes = dsinks = None
    if want_k or want_v:
        sizes = sizes_of("flash_attention_bwd_keys", key_sizes, given)
        if q_ids is not None:
            given["bounds_ptr"] = segment_bounds(
                kv_ids, q_ids, sizes["BLOCK_K"], sizes["BLOCK_Q"]
            )
        together = section(t * (n // heads), h + hv, query.dtype)
        dk, dv = sparse_call(
            flash_attention_bwd_keys_kernel,
            (-(-s // sizes["BLOCK_K"]) * b * heads,),
            given,
            {"dk_ptr": like(key), "dv_ptr": like(value)},
            {"C": constants, "SECTION": together, **sizes},
        )
    if want_q or want_slopes:
        sizes = sizes_of("flash_attention_bwd_queries", query_sizes, given)
        if q_ids is not None:
            given["bounds_ptr"] = segment_bounds(
                q_ids, kv_ids, sizes["BLOCK_Q"], sizes["BLOCK_K"]
            )
        together = section(s, h + hv, key.dtype) * (n // heads)
        if want_slopes:
            slopes = jax.ShapeDtypeStruct((b, n, t, s), bias.dtype)
        dq, slopes = sparse_call(
            flash_attention_bwd_queries_kernel,
            (-(-t // sizes["BLOCK_Q"]) * b * n,),
            given,
            {"dq_ptr": like(query), "slopes_ptr": slopes},
            {"C": constants, "SECTION": together, **sizes},
        )
    if want_sinks:
        share = jnp.exp2(
            sinks.astype(jnp.float32)[:, None] * LOG2_E - lse2[..., :t]
        )  # [b n t]; 0 where lse2 is inf
        dsinks = -jnp.sum(share * delta[..., :t], (0, 2)).astype(sinks.dtype)
    return dq, dk, dv, slopes, dsinks
