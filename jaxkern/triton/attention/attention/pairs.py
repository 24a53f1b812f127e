"""Which pairs of a query and a key see each other, and the logits of those that do.

A query is at row + q_offset among the keys, row + s - t by default. Causal, window,
lengths, segments and mask each hide pairs. Blocks of pairs that are hidden entirely are
never visited, and those that are seen entirely are not masked: a kernel has a loop over
masked blocks, one over the whole ones, and one over the masked blocks behind.

C is the problem's Constants. `pairs` of a loop are its rows or columns, the offset, and
the length.
"""

from jaxkern.gpu.triton_call import constexpr_function, jit, tl


@constexpr_function
def loops_over_keys(C, BLOCK_K, bounds, lengths, mask):
    """Which of the three loops there are."""
    ragged = C.S % BLOCK_K != 0 or lengths or bounds or mask
    return C.WINDOW is not None or bounds, not mask, C.CAUSAL or ragged


@jit
def keys_of_head(k_ptr, v_ptr, row, kv_head, C: tl.constexpr):
    """Where keys and values of a head begin, from a row on."""
    k_at = k_ptr + (row * C.HEADS + kv_head) * C.H
    v_at = v_ptr + (row * C.HEADS + kv_head) * C.HV
    return k_at, v_at


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
def of_head(ptr, batch, n, BATCH_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr):
    """Where the mask or the bias of a head begins."""
    return ptr + batch.to(tl.int64) * BATCH_STRIDE + n.to(tl.int64) * HEAD_STRIDE


@jit
def ranges(may, must, mask_ptr, bounds_ptr, at_bounds, BLOCK: tl.constexpr):
    """The blocks to visit: [first, last), of these [whole, whole_end) without a mask.

    From the first and the last of the rows that some pair `may`, that all `must` see.
    """
    start, stop = may
    whole_start, whole_stop = must
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
    if mask_ptr is not None:
        whole, whole_end = first, first
    return first, whole, whole_end, last


@jit
def key_ranges(
    row,
    offset,
    length,
    mask_ptr,
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
    may, must = (start, stop), (whole_start, whole_stop)
    return ranges(may, must, mask_ptr, bounds_ptr, at_bounds, BLOCK_K)


@jit
def query_ranges(
    column,
    offset,
    length,
    mask_ptr,
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
    may, must = (start, stop), (whole_start, whole_stop)
    return ranges(may, must, mask_ptr, bounds_ptr, at_bounds, BLOCK_Q)


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
