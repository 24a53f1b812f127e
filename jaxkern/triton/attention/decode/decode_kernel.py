"""The decode kernel over linear and paged caches: one share of a sequence's keys."""

from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.triton_call import jit, libdevice, tl


@jit
def num_shares(
    kv_lengths_ptr,
    B: tl.constexpr,
    ALL_B: tl.constexpr,
    S: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIKE: tl.constexpr,
):
    """SPLITS, or ALIKE where no sequence is more than 5/4 as long as their mean."""
    shares = tl.full([], SPLITS, tl.int32)
    if ALIKE < SPLITS:
        every = tl.arange(0, ALL_B)
        lengths = tl.load(kv_lengths_ptr + every, every < B, 0).to(tl.int64)
        lengths = tl.minimum(tl.maximum(lengths, 0), S)
        alike = 4 * B * tl.max(lengths, 0) <= 5 * tl.sum(lengths, 0)
        shares = tl.where(alike, ALIKE, SPLITS)
    return shares


@jit
def share_of_keys(
    b,
    split,
    shares,
    kv_lengths_ptr,
    q_offset_ptr,
    S: tl.constexpr,
    T: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The keys first ... of all shares, start ... stop - 1 of this; the first position.

    Together the first `shares` shares have the keys that some row sees.
    """
    first = tl.full([], 0, tl.int32)
    end = tl.full([], S, tl.int32)
    position = tl.full([], S - T, tl.int32)
    if kv_lengths_ptr is not None:
        length = tl.load(kv_lengths_ptr + b).to(tl.int64)
        end = tl.minimum(tl.maximum(length, 0), S).to(tl.int32)
    if q_offset_ptr is not None:
        offset = tl.load(q_offset_ptr + b).to(tl.int64)
        position = tl.minimum(tl.maximum(offset, -FAR), FAR).to(tl.int32)
    if CAUSAL:
        end = tl.minimum(end, position + T)
    if WINDOW is not None:
        first = tl.minimum(tl.maximum(position - WINDOW + 1, 0), S)
    aligned = first // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(tl.maximum(end - aligned, 0), BLOCK), shares) * BLOCK
    start = aligned + split * share
    stop = tl.minimum(start + share, end)
    return first, start, stop, position


@jit
def load_wide(x_ptr, rows, present, start, WIDTH, PIECE: tl.constexpr):
    """PIECE dims from `start` on of rows of WIDTH, as float32."""
    dims = start + tl.arange(0, PIECE)
    mask = present[:, None] & (dims < WIDTH)[None, :]
    return tl.load(x_ptr + rows * WIDTH + dims[None, :], mask, 0.0).to(tl.float32)


@jit
def tokens_at(
    at,
    j,
    inside,
    b,
    block_tables_ptr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the keys j = at ... at + BLOCK - 1 of a sequence lie, and which exist."""
    if block_tables_ptr is None:
        return b * S + j, inside
    else:
        table = block_tables_ptr + b * (S // PAGE)
        if PAGE % BLOCK == 0:
            page = tl.zeros([BLOCK], tl.int64) + tl.load(table + at // PAGE)
        else:
            page = tl.load(table + j // PAGE, inside, -1).to(tl.int64)
        exists = (page >= 0) & (page < NUM_PAGES)
        inside = inside & exists
        return tl.where(exists, page, 0) * PAGE + j % PAGE, inside


@jit
def shown_scores(
    z,
    inside,
    j,
    p_at,
    T: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """Products of queries at `p_at` and keys `j` as base-2 logits, hidden ones -inf."""
    z = z * SCALE
    if SOFTCAP is not None:
        z = SOFTCAP * libdevice.tanh(z / SOFTCAP)
    visible = inside[None, :]
    if CAUSAL and T > 1:
        visible = visible & (j[None, :] <= p_at[:, None])
    if WINDOW is not None and T > 1:
        visible = visible & (j[None, :] > p_at[:, None] - WINDOW)
    return tl.where(visible, z * LOG2E, -float("inf"))


@jit
def added_weights(z, top, total):
    """Weights relative to the largest logit so far: (p, shrink, total, that logit).

    `shrink` is for what was summed with the largest before it.
    """
    higher = tl.maximum(top, tl.max(z, 1))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(z - base[:, None])
    shrink = tl.exp2(top - base)
    return p, shrink, total * shrink + tl.sum(p, 1), higher


@jit
def share_and_lse(top, total, SPLITS: tl.constexpr, LOG2E: tl.constexpr):
    """(seen, total without zeros, log-sum-exp: natural of one share, else base 2)."""
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, top + tl.log2(total), -float("inf"))
    if SPLITS == 1:
        lse = lse / LOG2E
    return seen, total, lse


@jit
def decode_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    kv_lengths_ptr,
    q_offset_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    T: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAR: tl.constexpr,
    LOG2E: tl.constexpr,
    B: tl.constexpr,
    ALL_B: tl.constexpr,
    NATIVE_SCORES: tl.constexpr,
    NATIVE_SUMS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS rows over one share of the keys: normalised sums and base-2 log-sum-exps.

    With one share: the result, and the natural log-sum-exp with the sinks.
    """
    if AHEAD:
        begin_behind_those_ahead()
    # neighbours, so that the tiles of a head read its keys from the caches
    tile = tl.program_id(0) % TILES
    program = tl.program_id(0) // TILES
    head = program % K
    split = program // K % SPLITS
    b = program // (K * SPLITS)
    shares = num_shares(kv_lengths_ptr, B, ALL_B, S, SPLITS, ALIKE)
    if ALIKE < SPLITS:
        # shares without keys come last
        b = tl.where(shares == ALIKE, program // K % B, b)
        split = tl.where(shares == ALIKE, program // (K * B), split)
    b = b.to(tl.int64)

    first, start, stop, position = share_of_keys(
        b, split, shares, kv_lengths_ptr, q_offset_ptr, S, T, CAUSAL, WINDOW, FAR, BLOCK
    )

    # row r is query r // G of head r % G
    r = tile * ROWS + tl.arange(0, ROWS)
    present = r < T * G
    row = (b * T + r // G) * (K * G) + head * G + r % G
    p_at = position + r // G
    dims = tl.arange(0, DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    if PIECE == DIMS:
        q_mask = present[:, None] & (dims < H)[None, :]
        q = tl.load(query_ptr + row[:, None] * H + dims[None, :], q_mask, 0.0)
        if not NATIVE_SCORES:
            q = q.to(tl.float32)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_DIMS], tl.float32)
    for at in tl.range(start, stop, BLOCK):
        j = at + tl.arange(0, BLOCK)
        inside = (j >= first) & (j < stop)
        where, inside = tokens_at(
            at, j, inside, b, block_tables_ptr, S, PAGE, NUM_PAGES, BLOCK
        )
        where = where[:, None] * K + head
        v_mask = inside[:, None] & (value_dims < HV)[None, :]
        if PIECE == DIMS:
            k_mask = inside[:, None] & (dims < H)[None, :]
            k = tl.load(key_ptr + where * H + dims[None, :], k_mask, 0.0)
        v = tl.load(value_ptr + where * HV + value_dims[None, :], v_mask, 0.0)
        if PIECE == DIMS:
            if not NATIVE_SCORES:
                k = k.to(tl.float32)
            z = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        else:
            z = tl.zeros([ROWS, BLOCK], tl.float32)
            for d in tl.static_range(0, H, PIECE):
                q = load_wide(query_ptr, row[:, None], present, d, H, PIECE)
                k = load_wide(key_ptr, where, inside, d, H, PIECE)
                z = tl.dot(q, tl.trans(k), z, input_precision="tf32x3")
        z = shown_scores(z, inside, j, p_at, T, SCALE, CAUSAL, WINDOW, SOFTCAP, LOG2E)
        p, shrink, total, top = added_weights(z, top, total)
        acc = acc * shrink[:, None]
        if NATIVE_SUMS:
            acc = tl.dot(p.to(v.dtype), v, acc)
        else:
            acc = tl.dot(p, v.to(tl.float32), acc, input_precision="tf32x3")

    if SPLITS == 1 and sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * G + r % G).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        acc = acc * shrink[:, None]
        top = base
    seen, total, lse = share_and_lse(top, total, SPLITS, LOG2E)
    to = row * SPLITS + split
    tl.store(lse_ptr + to, lse, present)
    # the merge reads no share without keys
    out_mask = present[:, None] & (value_dims < HV)[None, :]
    if SPLITS > 1:
        out_mask = out_mask & seen[:, None]
    out = acc / total[:, None]
    tl.store(out_ptr + to[:, None] * HV + value_dims[None, :], out, out_mask)
