"""RMSNorm of each head, then its rotation: one launch for queries and keys.

    normed = x / rms(x) * (weight + offset);  y = normed, its pairs turned by (cos, sin)

A program holds whole heads in registers: every head is read and written once, and the
tables once for the heads of a token. The first programs of a grid take the queries, the
others the keys.
"""

from jaxkern.gpu import triton_call
from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.norm.row_tiles import per_row
from jaxkern.triton.rope.head_tiles import (
    head_of,
    heads_and_tokens,
    heads_of,
    read_angles,
    read_pairs,
    read_rest,
    sizes_of,
    tile_of,
    write_pairs,
    write_rest,
)

LONGEST = 4096  # dims of a head: a backward program keeps one beside its sums


def unsupported(**named) -> str | None:
    x = named["query"] if "query" in named else named["x"]
    if named["at_end"]:
        return "`at_end`: the kernel turns the first dims of a head"
    if x.shape[-1] > LONGEST:
        return f"a head has {x.shape[-1]} dims, more than {LONGEST}"
    return triton_call.unsupported(**named)


@jit
def norm_and_turn(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rstd_ptr,
    block,
    NUM_TOKENS: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """One block of heads; a token has N."""
    H: tl.constexpr = HEAD[0]
    REST: tl.constexpr = HEAD[4]
    head, token = heads_of(block, N, TILE)
    present = head < NUM_TOKENS * N
    start = head * H
    a, b = read_pairs(x_ptr, start, present, HEAD, TILE)
    cos = read_angles(cos_ptr, token, NUM_TOKENS, HEAD)
    sin = read_angles(sin_ptr, token, NUM_TOKENS, HEAD)
    squares = tl.sum(a * a + b * b, 2, keep_dims=True)
    if REST:
        rest = read_rest(x_ptr, start, present, HEAD)
        squares += tl.sum(rest * rest, 2, keep_dims=True)
    rstd = tl.rsqrt(squares / H + EPS)
    tl.store(rstd_ptr + head, rstd, present)
    a *= rstd
    b *= rstd
    one = tl.zeros([1, 1, 1], tl.int64)
    if weight_ptr is not None:
        wa, wb = read_pairs(weight_ptr, one, one == 0, HEAD, (1, 1))
        a *= wa + OFFSET
        b *= wb + OFFSET
    ya, yb = a * cos - b * sin, b * cos + a * sin
    write_pairs(y_ptr, start, present, ya, yb, HEAD, TILE)
    if REST:
        rest *= rstd
        if weight_ptr is not None:
            rest *= read_rest(weight_ptr, one, one == 0, HEAD) + OFFSET
        write_rest(y_ptr, start, present, rest, HEAD)


@jit
def qk_norm_rope_fwd_kernel(
    query_ptr,
    key_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    y_query_ptr,
    y_key_ptr,
    query_rstd_ptr,
    key_rstd_ptr,
    NUM_TOKENS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        begin_behind_those_ahead()
    block = tl.program_id(0)
    if block < QUERY_PROGRAMS:
        norm_and_turn(
            query_ptr,
            query_weight_ptr,
            cos_ptr,
            sin_ptr,
            y_query_ptr,
            query_rstd_ptr,
            block,
            NUM_TOKENS,
            N,
            EPS,
            OFFSET,
            HEAD,
            QUERY_TILE,
        )
    elif key_ptr is not None:
        norm_and_turn(
            key_ptr,
            key_weight_ptr,
            cos_ptr,
            sin_ptr,
            y_key_ptr,
            key_rstd_ptr,
            block - QUERY_PROGRAMS,
            NUM_TOKENS,
            K,
            EPS,
            OFFSET,
            HEAD,
            KEY_TILE,
        )


def qk_norm_rope_fwd(
    query,
    key,
    query_weight,
    key_weight,
    cos,
    sin,
    *,
    eps,
    offset,
    pairing,
    pair_offset,
    at_end,
):
    """(y_query, y_key, query_rstd, key_rstd); those of an absent key are None."""
    del at_end  # refused
    heads, key_heads, tokens = heads_and_tokens(query, key)
    head = head_of(query.shape[-1], cos.shape[-1], pairing, pair_offset)
    sizes = sizes_of(head, 2048)
    together = sizes["TOGETHER"]
    programs = [-(-tokens * n // together) for n in (heads, key_heads)]
    given = {
        "query_ptr": query,
        "key_ptr": key,
        "query_weight_ptr": query_weight,
        "key_weight_ptr": key_weight,
        "cos_ptr": cos,
        "sin_ptr": sin,
    }
    results = {
        "y_query_ptr": like(query),
        "y_key_ptr": like(key),
        "query_rstd_ptr": per_row(query),
        "key_rstd_ptr": None if key is None else per_row(key),
    }
    constants = {
        "NUM_TOKENS": tokens,
        "N": heads,
        "K": key_heads,
        "QUERY_PROGRAMS": programs[0],
        "EPS": eps,
        "OFFSET": offset,
        "HEAD": head,
        "QUERY_TILE": tile_of(heads, together),
        "KEY_TILE": tile_of(key_heads, together),
        "num_warps": sizes["num_warps"],
    }
    return sparse_call(
        qk_norm_rope_fwd_kernel, (sum(programs),), given, results, constants
    )
