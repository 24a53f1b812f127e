"""Heads of one product, rotated, to arrays of their own, and back: each read once.

A program takes a tile of heads: the first programs of a grid those of the queries, the
next those of the keys, the last those of the values, which are copied.
"""

from typing import Any

import jax

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.rope.head_tiles import (
    head_of,
    heads_of,
    read_angles,
    read_pairs,
    read_rest,
    sizes_of,
    tile_of,
    write_pairs,
    write_rest,
)

ELEMENTS = 2048  # of a tile


@jit
def places(
    block,
    PART: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    ALL: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of the heads of a block: whether they are, tokens, starts in both arrays.

    PART is (heads of a token, those before them in the product).
    """
    N: tl.constexpr = PART[0]
    head, token = heads_of(block, N, TILE)
    together = (head + token * (ALL - N) + PART[1]) * H
    return head < NUM_TOKENS * N, token, together, head * H


@jit
def turn(
    qkv_ptr,
    own_ptr,
    cos_ptr,
    sin_ptr,
    block,
    PART: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    ALL: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    BACK: tl.constexpr,
):
    REST: tl.constexpr = HEAD[4]
    present, token, together, own = places(block, PART, NUM_TOKENS, ALL, HEAD[0], TILE)
    cos = read_angles(cos_ptr, token, NUM_TOKENS, HEAD)
    sin = read_angles(sin_ptr, token, NUM_TOKENS, HEAD)
    if BACK:
        a, b = read_pairs(own_ptr, own, present, HEAD, TILE)
        c, d = a * cos + b * sin, b * cos - a * sin
        write_pairs(qkv_ptr, together, present, c, d, HEAD, TILE)
        if REST:
            rest = read_rest(own_ptr, own, present, HEAD)
            write_rest(qkv_ptr, together, present, rest, HEAD)
    else:
        a, b = read_pairs(qkv_ptr, together, present, HEAD, TILE)
        c, d = a * cos - b * sin, b * cos + a * sin
        write_pairs(own_ptr, own, present, c, d, HEAD, TILE)
        if REST:
            rest = read_rest(qkv_ptr, together, present, HEAD)
            write_rest(own_ptr, own, present, rest, HEAD)


@jit
def copy(
    qkv_ptr,
    own_ptr,
    block,
    PART: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    ALL: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    BACK: tl.constexpr,
):
    H: tl.constexpr = HEAD[0]
    present, _, together, own = places(block, PART, NUM_TOKENS, ALL, H, TILE)
    dim = tl.arange(0, DIMS)[None, None, :]
    mask = present & (dim < H)
    if BACK:
        tl.store(qkv_ptr + together + dim, tl.load(own_ptr + own + dim, mask), mask)
    else:
        tl.store(own_ptr + own + dim, tl.load(qkv_ptr + together + dim, mask), mask)


@jit
def every_part(
    qkv_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    NUM_TOKENS: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,
    K_PROGRAMS: tl.constexpr,
    HEAD: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    DIMS: tl.constexpr,
    BACK: tl.constexpr,
):
    ALL: tl.constexpr = Q + 2 * K
    program = tl.program_id(0)
    if program < Q_PROGRAMS:
        turn(
            qkv_ptr,
            query_ptr,
            cos_ptr,
            sin_ptr,
            program,
            (Q, 0),
            NUM_TOKENS,
            ALL,
            HEAD,
            Q_TILE,
            BACK,
        )
    elif program < Q_PROGRAMS + K_PROGRAMS:
        turn(
            qkv_ptr,
            key_ptr,
            cos_ptr,
            sin_ptr,
            program - Q_PROGRAMS,
            (K, Q),
            NUM_TOKENS,
            ALL,
            HEAD,
            K_TILE,
            BACK,
        )
    else:
        copy(
            qkv_ptr,
            value_ptr,
            program - Q_PROGRAMS - K_PROGRAMS,
            (K, Q + K),
            NUM_TOKENS,
            ALL,
            HEAD,
            K_TILE,
            DIMS,
            BACK,
        )


@jit
def qkv_rope_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    NUM_TOKENS: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,
    K_PROGRAMS: tl.constexpr,
    HEAD: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    every_part(
        qkv_ptr,
        query_ptr,
        key_ptr,
        value_ptr,
        cos_ptr,
        sin_ptr,
        NUM_TOKENS,
        Q,
        K,
        Q_PROGRAMS,
        K_PROGRAMS,
        HEAD,
        Q_TILE,
        K_TILE,
        DIMS,
        False,
    )


@jit
def qkv_rope_bwd_kernel(
    cos_ptr,
    sin_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    qkv_ptr,
    NUM_TOKENS: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,
    K_PROGRAMS: tl.constexpr,
    HEAD: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    every_part(
        qkv_ptr,
        query_ptr,
        key_ptr,
        value_ptr,
        cos_ptr,
        sin_ptr,
        NUM_TOKENS,
        Q,
        K,
        Q_PROGRAMS,
        K_PROGRAMS,
        HEAD,
        Q_TILE,
        K_TILE,
        DIMS,
        True,
    )


def launch_of(
    query: Any, kv_heads: int, pairs: int, pairing: str, pair_offset: int
) -> tuple[int, dict[str, Any]]:
    """Programs of a grid and constants, for queries of this shape."""
    *_, q, h = query.shape
    tokens = query.shape[-3]
    for n in query.shape[:-3]:
        tokens *= n
    head = head_of(h, pairs, pairing, pair_offset)
    sizes = sizes_of(head, ELEMENTS)
    together = sizes["TOGETHER"]
    for_queries, for_keys = (-(-tokens * n // together) for n in (q, kv_heads))
    return for_queries + 2 * for_keys, {
        "NUM_TOKENS": tokens,
        "Q": q,
        "K": kv_heads,
        "Q_PROGRAMS": for_queries,
        "K_PROGRAMS": for_keys,
        "HEAD": head,
        "Q_TILE": tile_of(q, together),
        "K_TILE": tile_of(kv_heads, together),
        "DIMS": next_power_of_2(h),
        "num_warps": sizes["num_warps"],
    }


def qkv_rope(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    kv_heads: int,
    pairing: str,
    pair_offset: int,
) -> tuple[jax.Array | None, ...]:
    *lead, n, h = qkv.shape
    query, key = (
        jax.ShapeDtypeStruct((*lead, heads, h), qkv.dtype)
        for heads in (n - 2 * kv_heads, kv_heads)
    )
    programs, constants = launch_of(
        query, kv_heads, cos.shape[-1], pairing, pair_offset
    )
    return sparse_call(
        qkv_rope_kernel,
        (programs,),
        {"qkv_ptr": qkv, "cos_ptr": cos, "sin_ptr": sin},
        {"query_ptr": query, "key_ptr": key, "value_ptr": key},
        constants,
    )


def qkv_rope_bwd(
    cos: jax.Array,
    sin: jax.Array,
    dquery: jax.Array,
    dkey: jax.Array,
    dvalue: jax.Array,
    *,
    kv_heads: int,
    pairing: str,
    pair_offset: int,
) -> jax.Array | None:
    *lead, q, h = dquery.shape
    programs, constants = launch_of(
        dquery, kv_heads, cos.shape[-1], pairing, pair_offset
    )
    [dqkv] = sparse_call(
        qkv_rope_bwd_kernel,
        (programs,),
        {
            "cos_ptr": cos,
            "sin_ptr": sin,
            "query_ptr": dquery,
            "key_ptr": dkey,
            "value_ptr": dvalue,
        },
        {"qkv_ptr": jax.ShapeDtypeStruct((*lead, q + 2 * kv_heads, h), dquery.dtype)},
        constants,
    )
    return dqkv
