"""The decode kernel over linear and paged caches: one share of a sequence's keys."""

from jaxkern.gpu.cluster import (
    all_have_sent,
    exchange_memory,
    peers_have_begun,
    receive,
    send,
)
from jaxkern.gpu.dependent_launch import (
    begin_behind_those_ahead,
    let_next_begin,
    wait_for_those_ahead,
)
from jaxkern.gpu.triton_call import constexpr_function, jit, libdevice, tl


@constexpr_function
def power_of_2(n, parts):
    """The next from n / parts on."""
    return 1 << (-(-n // parts) - 1).bit_length()


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
def place_of(
    program,
    shares,
    K: tl.constexpr,
    TILES: tl.constexpr,
    B: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIKE: tl.constexpr,
    IN_CLUSTERS: tl.constexpr,
):
    """(sequence, key head, tile of rows, share) of a program.

    Neighbours have the tiles of a head, which read its keys from the caches, or in
    clusters the shares of a tile.
    """
    if IN_CLUSTERS:
        split = program % SPLITS
        program //= SPLITS
    tile = program % TILES
    program //= TILES
    head = program % K
    if IN_CLUSTERS:
        b = program // K
    else:
        split = program // K % SPLITS
        b = program // (K * SPLITS)
    if ALIKE < SPLITS:
        # shares without keys come last
        b = tl.where(shares == ALIKE, program // K % B, b)
        split = tl.where(shares == ALIKE, program // (K * B), split)
    return b.to(tl.int64), head, tile, split


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
def for_later(
    x_ptr, row, count, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Asks for `count` of every K-th row of WIDTH, BLOCK at most, in the L2 cache.

    Nothing is read, so a kernel ahead may still write them.
    """
    LINE: tl.constexpr = 1024 // x_ptr.dtype.element_ty.primitive_bitwidth
    j = tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, power_of_2(WIDTH, LINE))[None, :] * LINE
    at = x_ptr + (row + j * K) * WIDTH + dims
    mask = (j < count) & (dims < WIDTH)
    tl.inline_asm_elementwise(
        """{ .reg .pred asked; setp.ne.b32 asked, $2, 0;
        @asked prefetch.global.L2 [$1]; mov.b32 $0, 0; }""",
        "=r,l,r",
        [at.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
def with_sink(sums, sink):
    """(top, total, acc) with one more logit in base 2, that has no value."""
    top, total, acc = sums
    higher = tl.maximum(top, sink)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    shrink = tl.exp2(top - base)
    return base, total * shrink + tl.exp2(sink - base), acc * shrink[:, None]


@jit
def opening(gate, mask):
    """sigmoid(gate) in float32, of what is there."""
    return tl.sigmoid(tl.load(gate, mask, 0.0).to(tl.float32))


@jit
def merge_in_cluster(
    out,
    lse,
    memory,
    place,
    sinks_ptr,
    to,
    HV: tl.constexpr,
    SPLITS: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """Writes sum_s 2**lse_s out_s / sum_s 2**lse_s over the shares s of a cluster.

    A program sends each other its part of the dims of `out` and all of `lse`. It merges
    its own part, in the order of the shares whoever comes last. `place` has its share,
    and of each row the head, the row of the result, and whether there is one. `to` has
    the results, of which the second may be absent, and where each row's gate is, or
    None.
    """
    split, head, row, present = place
    out_ptr, lse_ptr, gate = to
    ROWS: tl.constexpr = out.shape[0]
    VALUE_DIMS: tl.constexpr = out.shape[1]
    PART: tl.constexpr = power_of_2(VALUE_DIMS, SPLITS)
    r = tl.arange(0, ROWS)
    dims = tl.arange(0, VALUE_DIMS)[None, :]
    lses = memory + 4 * SPLITS * ROWS * PART
    mine = (split * ROWS + r) * 4
    part = tl.arange(0, PART)[None, :]
    dim = split * PART + part
    mask = present[:, None] & (dim < HV)
    if gate is not None:  # on its way while the shares are
        opened = opening(gate + dim, mask)

    peers_have_begun()
    there = memory + mine[:, None] * PART + dims % PART * 4
    send(there, dims // PART, out, present[:, None] & (dims < HV))
    for peer in tl.static_range(SPLITS):
        send(lses + mine, peer, lse, present)
    all_have_sent()

    top = tl.full([ROWS], -float("inf"), tl.float32)
    for share in tl.static_range(SPLITS):
        top = tl.maximum(top, receive(lses + (share * ROWS + r) * 4))
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, present, 0.0).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PART], tl.float32)
    for share in tl.static_range(SPLITS):
        z = receive(lses + (share * ROWS + r) * 4)
        weight = tl.exp2(z - base)
        x = receive(memory + ((share * ROWS + r[:, None]) * PART + part) * 4)
        # of a share without keys nothing counts, not even NaN
        acc += weight[:, None] * tl.where((z == -float("inf"))[:, None], 0.0, x)
        total += weight
    if sinks_ptr is not None:
        total += tl.exp2(sink - base)
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    acc /= total[:, None]
    if gate is not None:
        acc *= opened
    tl.store(out_ptr + row[:, None] * HV + dim, acc, mask)
    if lse_ptr is not None:
        lse = tl.where(seen, base + tl.log2(total), top) / LOG2E
        first = tl.zeros([ROWS], tl.int32) + split == 0
        tl.store(lse_ptr + row, lse, present & first)


@jit
def store_share(
    out, lse, seen, place, out_ptr, lse_ptr, HV: tl.constexpr, SPLITS: tl.constexpr
):
    """A share's sums and log-sum-exp; `place` is split, row of the result, presence."""
    split, row, present = place
    value_dims = tl.arange(0, out.shape[1])
    to = row * SPLITS + split
    tl.store(lse_ptr + to, lse, present)
    # the merge reads no share without keys
    written = present if SPLITS == 1 else present & seen
    out_mask = written[:, None] & (value_dims < HV)[None, :]
    tl.store(out_ptr + to[:, None] * HV + value_dims[None, :], out, out_mask)


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
    EXCHANGE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS rows over one share of the keys: normalised sums and base-2 log-sum-exps.

    With one share, or where the shares are a cluster and EXCHANGE bytes are theirs to
    merge: the result, and the natural log-sum-exp with the sinks.
    """
    if EXCHANGE:
        memory = exchange_memory(EXCHANGE)
    if AHEAD == 2:
        let_next_begin()
    elif AHEAD:
        begin_behind_those_ahead()
    shares = num_shares(kv_lengths_ptr, B, ALL_B, S, SPLITS, ALIKE)
    b, head, tile, split = place_of(
        tl.program_id(0), shares, K, TILES, B, SPLITS, ALIKE, EXCHANGE
    )
    first, start, stop, position = share_of_keys(
        b, split, shares, kv_lengths_ptr, q_offset_ptr, S, T, CAUSAL, WINDOW, FAR, BLOCK
    )
    if AHEAD == 2:
        if block_tables_ptr is None:
            for_later(key_ptr, (b * S + start) * K + head, stop - start, K, H, BLOCK)
            for_later(value_ptr, (b * S + start) * K + head, stop - start, K, HV, BLOCK)
        wait_for_those_ahead()

    # row r is query r // G of head r % G
    r = tile * ROWS + tl.arange(0, ROWS)
    present = r < T * G
    row = (b * T + r // G) * (K * G) + head * G + r % G
    p_at = position + r // G
    dims, value_dims = tl.arange(0, DIMS), tl.arange(0, VALUE_DIMS)
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

    if SPLITS == 1 and sinks_ptr is not None:  # else the merge has them
        sink = tl.load(sinks_ptr + head * G + r % G).to(tl.float32) * LOG2E
        top, total, acc = with_sink((top, total, acc), sink)
    seen, total, lse = share_and_lse(top, total, SPLITS, LOG2E)
    out = acc / total[:, None]
    if EXCHANGE:
        place = split, head * G + r % G, row, present
        to = out_ptr, lse_ptr, None
        merge_in_cluster(out, lse, memory, place, sinks_ptr, to, HV, SPLITS, LOG2E)
        return
    store_share(out, lse, seen, (split, row, present), out_ptr, lse_ptr, HV, SPLITS)
