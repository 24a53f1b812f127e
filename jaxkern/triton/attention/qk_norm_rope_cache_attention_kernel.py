"""A token's norm, rotation, write to the cache and attention: the kernel.

A program takes the query heads of one key head of a sequence and a share of its keys;
the programs of a cluster merge their shares. The new key and value are one key more of
the first share: they are never read from the cache, so nothing waits for their write,
and the keys that were there can be loaded before the kernel ahead has ended. So are the
tables and the weights of norms.

HEAD and CALL as in qk_norm_rope_cache_kernel.py; VALUE is (hv, the power of 2 that
holds it, eps of the norm of values or None). A query has GATE numbers of its output
gate behind it.
"""

from jaxkern.gpu.cluster import exchange_memory
from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.attention.decode.decode_kernel import (
    added_weights,
    merge_in_cluster,
    opening,
    share_and_lse,
    shown_scores,
    with_sink,
)
from jaxkern.triton.kv_cache.cache_slots import new_tokens
from jaxkern.triton.kv_cache.qk_norm_rope_cache_kernel import (
    carry_over_both,
    normed_values,
)


@jit
def share_before(
    position, split, S: tl.constexpr, WINDOW, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The old keys first ... that a token at `position` sees, start ... stop - 1 of
    this share."""
    end = tl.minimum(tl.maximum(position, 0), S).to(tl.int32)
    first = tl.full([], 0, tl.int32)
    if WINDOW is not None:
        first = tl.minimum(tl.maximum(position - WINDOW + 1, 0), S).to(tl.int32)
    aligned = first // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(tl.maximum(end - aligned, 0), BLOCK), SPLITS) * BLOCK
    start = aligned + split * share
    return first, start, tl.minimum(start + share, end)


@jit
def load_heads(
    cache_ptr,
    j,
    inside,
    b,
    head,
    S: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Keys, or values, of one head in the slots j; zeros where they do not count."""
    dims = tl.arange(0, DIMS)[None, :]
    row = (b * S + j)[:, None] * K + head
    mask = inside[:, None] & (dims < WIDTH)
    return tl.load(cache_ptr + row * WIDTH + dims, mask, 0.0)


@jit
def add_block(
    q,
    k,
    v,
    inside,
    sums,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """(top, total, acc) with one more block of keys."""
    top, total, acc = sums
    z = tl.dot(q, tl.trans(k))
    z = shown_scores(z, inside, None, None, 1, SCALE, True, None, SOFTCAP, LOG2E)
    p, shrink, total, top = added_weights(z, top, total)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return top, total, acc


@jit
def turn_of(cos_ptr, sin_ptr, b, HEAD: tl.constexpr):
    """What a head's dims and their partners are multiplied by, [1, dims] each."""
    R: tl.constexpr = HEAD[2]
    APART: tl.constexpr = HEAD[3]
    dim = tl.arange(0, HEAD[1])[None, :]
    if APART == 0:  # neighbours
        rotates = dim < 2 * R
        first = dim % 2 == 0
        pair = dim // 2
    else:
        first = dim < R
        rotates = first | ((dim >= APART) & (dim < APART + R))
        pair = tl.where(first, dim, dim - APART)
    cos = tl.load(cos_ptr + b * R + pair, rotates, 1.0).to(tl.float32)
    sin = tl.load(sin_ptr + b * R + pair, rotates, 0.0).to(tl.float32)
    return cos, tl.where(first, -sin, sin)


@jit
def with_neighbours(x):
    """Each dim's neighbour in its place."""
    pairs = tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2))
    even, odd = tl.split(pairs)
    return tl.reshape(tl.join(odd, even), x.shape)


@jit
def factors_of(weight_ptr, HEAD: tl.constexpr):
    """Those of a norm's dims, [1, dims]; 1 without any."""
    factors = tl.full([1, 1], 1.0, tl.float32)
    if HEAD[4] is not None and weight_ptr is not None:
        dim = tl.arange(0, HEAD[1])[None, :]
        factors = tl.load(weight_ptr + dim, dim < HEAD[0], 0.0).to(tl.float32)
        factors += HEAD[5]
    return factors


@jit
def turned(x_ptr, row, present, turn, factors, weight_ptr, HEAD: tl.constexpr):
    """Heads [rows, dims] in float32, normed and turned by `turn`."""
    H: tl.constexpr = HEAD[0]
    R: tl.constexpr = HEAD[2]
    APART: tl.constexpr = HEAD[3]
    EPS: tl.constexpr = HEAD[4]
    dim = tl.arange(0, HEAD[1])[None, :]
    x = tl.load(x_ptr + row * H + dim, present & (dim < H), 0.0).to(tl.float32)
    if APART == 0:
        rotates = dim < 2 * R
        partner = dim ^ 1
    else:
        first = dim < R
        rotates = first | ((dim >= APART) & (dim < APART + R))
        partner = tl.where(first, dim + APART, dim - APART)
        other = tl.load(x_ptr + row * H + partner, present & rotates, 0.0)
        other = other.to(tl.float32)
    if EPS is not None:
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / H + EPS)
        x *= rstd
        if weight_ptr is not None:
            x *= factors
        if APART != 0:
            other *= rstd
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + partner, rotates, 0.0).to(tl.float32)
                other *= weight + HEAD[5]
    if APART == 0:
        other = tl.where(rotates, with_neighbours(x), 0.0)
    return x * turn[0] + other * turn[1]


@jit
def take_up(
    new,
    weights,
    turn,
    factors,
    caches,
    place,
    row,
    present,
    fresh,
    S: tl.constexpr,
    K: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    GATE: tl.constexpr,
):
    """The token's queries, its key and its value; where `fresh` also in the caches.

    `place` is (sequence, key head, position); `row` has those of the queries, of which
    some are `present`.
    """
    query_ptr, key_ptr, value_ptr = new
    query_weight_ptr, key_weight_ptr = weights
    key_cache_ptr, value_cache_ptr = caches
    b, head, position = place
    H: tl.constexpr = HEAD[0]
    HV: tl.constexpr = VALUE[0]
    key_row = tl.zeros([1, 1], tl.int64) + b * K + head
    slot = (b * S + position) * K + head
    rows, there = row[:, None], present[:, None]
    heads = query_ptr + rows * GATE  # past the gates of those before
    q = turned(heads, rows, there, turn, factors[0], query_weight_ptr, HEAD)
    one = tl.full([1, 1], 1, tl.int1)
    key = turned(key_ptr, key_row, one, turn, factors[1], key_weight_ptr, HEAD)
    key = key.to(key_cache_ptr.dtype.element_ty)
    dims = tl.arange(0, HEAD[1])[None, :]
    value_dims = tl.arange(0, VALUE[1])[None, :]
    value = tl.load(value_ptr + key_row * HV + value_dims, value_dims < HV, 0.0)
    value = normed_values(value.to(tl.float32), HV, VALUE[2])
    value = value.to(value_cache_ptr.dtype.element_ty)
    tl.store(key_cache_ptr + slot * H + dims, key, dims < tl.where(fresh, H, 0))
    written = value_dims < tl.where(fresh, HV, 0)
    tl.store(value_cache_ptr + slot * HV + value_dims, value, written)
    return q.to(query_ptr.dtype.element_ty), key, value


@jit
def sums_of_new(
    q,
    key,
    value,
    fresh,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOG2E: tl.constexpr,
):
    """(top, total, acc) of the token's own key and value, of nothing if not `fresh`."""
    z = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1, keep_dims=True)
    seen = tl.zeros([1], tl.int1) | fresh
    z = shown_scores(z, seen, None, None, 1, SCALE, True, None, SOFTCAP, LOG2E)
    top = tl.max(z, 1)
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    acc = tl.where(seen[:, None], value.to(tl.float32), 0.0)
    acc += tl.zeros([q.shape[0], value.shape[1]], tl.float32)
    return top, total, acc


@jit
def qk_norm_rope_cache_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    old_key_cache_ptr,
    old_value_cache_ptr,
    positions_ptr,
    lengths_ptr,
    sinks_ptr,
    out_ptr,
    key_cache_ptr,
    value_cache_ptr,
    CALL: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    GATE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOG2E: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    KEY_COPY: tl.constexpr,
    VALUE_COPY: tl.constexpr,
    EXCHANGE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS query heads over one share of the keys, a block at most."""
    S: tl.constexpr = CALL[2]
    HV: tl.constexpr = VALUE[0]
    VALUE_DIMS: tl.constexpr = VALUE[1]
    if EXCHANGE:
        memory = exchange_memory(EXCHANGE)
    if AHEAD:
        let_next_begin()
    if AHEAD == 1:
        wait_for_those_ahead()
    program = tl.program_id(0)
    split = program % SPLITS
    head = program // SPLITS % K
    b = (program // (SPLITS * K)).to(tl.int64)
    position = tl.load(positions_ptr + b).to(tl.int64)
    count = new_tokens(lengths_ptr, b, b >= 0, 1)
    first, start, stop = share_before(position, split, S, WINDOW, SPLITS, BLOCK)
    j = start + tl.arange(0, BLOCK)
    inside = (j >= first) & (j < stop)
    k = load_heads(old_key_cache_ptr, j, inside, b, head, S, K, HEAD[0], HEAD[1])
    v = load_heads(old_value_cache_ptr, j, inside, b, head, S, K, HV, VALUE_DIMS)
    turn = turn_of(cos_ptr, sin_ptr, b, HEAD)
    factors = factors_of(query_weight_ptr, HEAD), factors_of(key_weight_ptr, HEAD)
    if AHEAD == 2:
        wait_for_those_ahead()

    r = tl.arange(0, ROWS)
    present = r < G
    row = b * (K * G) + head * G + r
    fresh = (split == 0) & (count > 0) & (position >= 0) & (position < S)
    new = query_ptr, key_ptr, value_ptr
    weights = query_weight_ptr, key_weight_ptr
    caches = key_cache_ptr, value_cache_ptr
    place = b, head, position
    q, new_key, new_value = take_up(
        new,
        weights,
        turn,
        factors,
        caches,
        place,
        row,
        present,
        fresh,
        S,
        K,
        HEAD,
        VALUE,
        GATE,
    )
    gate = query_ptr + (row[:, None] * (HEAD[0] + GATE) + HEAD[0])

    sums = sums_of_new(q, new_key, new_value, fresh, SCALE, SOFTCAP, LOG2E)
    top, total, acc = add_block(q, k, v, inside, sums, SCALE, SOFTCAP, LOG2E)
    if SPLITS == 1 and sinks_ptr is not None:  # else the merge has them
        sink = tl.load(sinks_ptr + head * G + r, present, 0.0).to(tl.float32) * LOG2E
        top, total, acc = with_sink((top, total, acc), sink)
    _, total, lse = share_and_lse(top, total, SPLITS, LOG2E)
    out = acc / total[:, None]
    if EXCHANGE:
        place = split, head * G + r, row, present
        to = out_ptr, None, (gate if GATE else None)
        merge_in_cluster(out, lse, memory, place, sinks_ptr, to, HV, SPLITS, LOG2E)
    else:
        value_dims = tl.arange(0, VALUE_DIMS)[None, :]
        mask = present[:, None] & (value_dims < HV)
        if GATE:
            out *= opening(gate + value_dims, mask)
        tl.store(out_ptr + row[:, None] * HV + value_dims, out, mask)
    places = positions_ptr, lengths_ptr, None
    old = old_key_cache_ptr, old_value_cache_ptr
    copies: tl.constexpr = (KEY_COPY, VALUE_COPY)
    carry_over_both(program, old, caches, places, CALL, PROGRAMS, copies)
