"""Norm and rotation of queries and keys, keys and values to the cache: the kernel.

A program takes a few vectors, heads of one or more tokens: the first programs queries,
the next ones keys, then values; the last ones look after the rest of the caches. Each
vector is read once, computed in float32, and written once.

A dim is turned by its partner, y[d] = x[d] cos +- x[partner] sin, which is loaded a
second time, from the caches of the multiprocessor. So a tile of heads is never taken
apart and keeps its dims in order, as codes want them.

HEAD is (h, the power of 2 that holds it, number of pairs, their distance or 0 for
neighbours, eps, offset); CALL and VECTOR as in cache_slots.py and cache_codes.py.
"""

from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.kv_cache.cache_slots import carry_over, rows_of
from jaxkern.triton.turboquant.cache_codes import write_vectors


@jit
def turned_heads(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    row,
    token,
    present,
    HEAD: tl.constexpr,
):
    """Heads [rows, dims] in float32, normed and rotated where there are tables."""
    H: tl.constexpr = HEAD[0]
    dim = tl.arange(0, HEAD[1])[None, :]
    x = tl.load(x_ptr + row * H + dim, present & (dim < H), 0.0).to(tl.float32)
    if cos_ptr is None:
        return x
    else:
        R: tl.constexpr = HEAD[2]
        APART: tl.constexpr = HEAD[3]
        EPS: tl.constexpr = HEAD[4]
        OFFSET: tl.constexpr = HEAD[5]
        if APART == 0:  # neighbours
            rotates = dim < 2 * R
            first = dim % 2 == 0
            partner = dim ^ 1
            pair = dim // 2
        else:
            first = dim < R
            rotates = first | ((dim >= APART) & (dim < APART + R))
            pair = tl.where(first, dim, dim - APART)
            partner = tl.where(first, dim + APART, pair)
        turns = present & rotates
        other = tl.load(x_ptr + row * H + partner, turns, 0.0).to(tl.float32)
        if EPS is not None:
            rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / H + EPS)
            x *= rstd
            other *= rstd
            if weight_ptr is not None:
                x *= tl.load(weight_ptr + dim, dim < H, 0.0).to(tl.float32) + OFFSET
                weight = tl.load(weight_ptr + partner, rotates, 0.0).to(tl.float32)
                other *= weight + OFFSET
        cos = tl.load(cos_ptr + token * R + pair, turns, 1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * R + pair, turns, 0.0).to(tl.float32)
        return x * cos + other * tl.where(first, -sin, sin)


@jit
def normed_values(x, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Values [rows, dims] in float32, normalised where there is an EPS."""
    if EPS is not None:
        x *= tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / WIDTH + EPS)
    return x


@jit
def turn_queries(
    block,
    query_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    CALL: tl.constexpr,
    N: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One block of the heads of queries; a token has N."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    present = row < CALL[0] * N
    y = turned_heads(
        query_ptr,
        weight_ptr,
        cos_ptr,
        sin_ptr,
        row,
        row // N,
        present,
        HEAD,
    )
    dim = tl.arange(0, HEAD[1])[None, :]
    tl.store(y_ptr + row * HEAD[0] + dim, y, present & (dim < HEAD[0]))


@jit
def take_up(
    block,
    new_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    places,
    cache_ptr,
    scales_ptr,
    signs_ptr,
    midpoints_ptr,
    CALL: tl.constexpr,
    K: tl.constexpr,
    HEAD: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_EPS: tl.constexpr,
):
    """One block of new keys, or of values where there are no tables, to the cache."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // K
    present = row < CALL[0] * K
    y = turned_heads(
        new_ptr,
        weight_ptr,
        cos_ptr,
        sin_ptr,
        row,
        token,
        present,
        HEAD,
    )
    if cos_ptr is None:
        y = normed_values(y, HEAD[0], VALUE_EPS)
    place, written = rows_of(token, present, places, CALL)
    write_vectors(
        y,
        cache_ptr,
        scales_ptr,
        signs_ptr,
        midpoints_ptr,
        place * K + row % K,
        written,
        ROWS,
        VECTOR,
    )


@jit
def carry_over_both(
    program,
    olds,
    news,
    places,
    CALL: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Carries over the rows of two arrays: of keys, then of values."""
    carry_over(program, olds[0], news[0], places, CALL, PROGRAMS, TILES[0])
    carry_over(program, olds[1], news[1], places, CALL, PROGRAMS, TILES[1])


@jit
def qk_norm_rope_cache_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    old_key_cache_ptr,
    old_key_scales_ptr,
    old_value_cache_ptr,
    old_value_scales_ptr,
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    key_signs_ptr,
    key_midpoints_ptr,
    value_signs_ptr,
    value_midpoints_ptr,
    y_query_ptr,
    key_cache_ptr,
    key_scales_ptr,
    value_cache_ptr,
    value_scales_ptr,
    CALL: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HEAD: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_EPS: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    KEY_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    VALUE_PROGRAMS: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    KEY_COPY: tl.constexpr,
    KEY_SCALES_COPY: tl.constexpr,
    VALUE_COPY: tl.constexpr,
    VALUE_SCALES_COPY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        begin_behind_those_ahead()
    program = tl.program_id(0)
    places = positions_ptr, lengths_ptr, slots_ptr
    if program < QUERY_PROGRAMS:
        turn_queries(
            program,
            query_ptr,
            query_weight_ptr,
            cos_ptr,
            sin_ptr,
            y_query_ptr,
            CALL,
            N,
            HEAD,
            ROWS,
        )
    elif program < QUERY_PROGRAMS + KEY_PROGRAMS:
        take_up(
            program - QUERY_PROGRAMS,
            key_ptr,
            key_weight_ptr,
            cos_ptr,
            sin_ptr,
            places,
            key_cache_ptr,
            key_scales_ptr,
            key_signs_ptr,
            key_midpoints_ptr,
            CALL,
            K,
            HEAD,
            KEY,
            ROWS,
            None,
        )
    elif program < QUERY_PROGRAMS + KEY_PROGRAMS + VALUE_PROGRAMS:
        take_up(
            program - QUERY_PROGRAMS - KEY_PROGRAMS,
            value_ptr,
            None,
            None,
            None,
            places,
            value_cache_ptr,
            value_scales_ptr,
            value_signs_ptr,
            value_midpoints_ptr,
            CALL,
            K,
            VALUE,
            VALUE,
            VALUE_ROWS,
            VALUE_EPS,
        )
    else:
        copy = program - QUERY_PROGRAMS - KEY_PROGRAMS - VALUE_PROGRAMS
        tiles: tl.constexpr = (KEY_COPY, VALUE_COPY)
        olds = old_key_cache_ptr, old_value_cache_ptr
        news = key_cache_ptr, value_cache_ptr
        carry_over_both(copy, olds, news, places, CALL, COPY_PROGRAMS, tiles)
        if key_scales_ptr is not None:
            scale_tiles: tl.constexpr = (KEY_SCALES_COPY, VALUE_SCALES_COPY)
            olds = old_key_scales_ptr, old_value_scales_ptr
            news = key_scales_ptr, value_scales_ptr
            carry_over_both(copy, olds, news, places, CALL, COPY_PROGRAMS, scale_tiles)
