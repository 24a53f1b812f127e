"""Heads of one product, rotated, to arrays of their own, and back: each read once.

A program takes a tile of heads: the first programs of a grid those of the queries, the
next those of the keys, the last those of the values, which are copied.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a problem fixes for both kernels; `C` in them.

    Attributes:
      NUM_TOKENS, Q, K: tokens, heads of queries and of keys (and values) of each.
      Q_PROGRAMS, K_PROGRAMS: for the queries, for the keys.
      HEAD: of head_tiles.py; DIMS holds a head.
      Q_TILE, K_TILE: TILE of head_tiles.py, of queries and of keys.
    """

    NUM_TOKENS: int
    Q: int
    K: int
    Q_PROGRAMS: int
    K_PROGRAMS: int
    HEAD: tuple[int, ...]
    DIMS: int
    Q_TILE: tuple[int, int]
    K_TILE: tuple[int, int]

    @property
    def ALL(self) -> int:
        """Heads of a token in the product."""
        return self.Q + 2 * self.K


@jit
def places(block, PART: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr):
    """Of the heads of a block: whether they are, tokens, starts in both arrays.

    PART is (heads of a token, those before them in the product).
    """
    N: tl.constexpr = PART[0]
    H: tl.constexpr = C.HEAD[0]
    head, token = heads_of(block, N, TILE)
    together = (head + token * (C.ALL - N) + PART[1]) * H
    return head < C.NUM_TOKENS * N, token, together, head * H


@jit
def turn(
    qkv_ptr,
    own_ptr,
    tables,
    block,
    PART: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BACK: tl.constexpr,
):
    HEAD: tl.constexpr = C.HEAD
    REST: tl.constexpr = HEAD[4]
    cos_ptr, sin_ptr = tables
    present, token, together, own = places(block, PART, C, TILE)
    cos = read_angles(cos_ptr, token, C.NUM_TOKENS, HEAD)
    sin = read_angles(sin_ptr, token, C.NUM_TOKENS, HEAD)
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
    qkv_ptr, own_ptr, block, PART: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr
):
    TILE: tl.constexpr = C.K_TILE
    present, _, together, own = places(block, PART, C, TILE)
    dim = tl.arange(0, C.DIMS)[None, None, :]
    mask = present & (dim < C.HEAD[0])
    if BACK:
        tl.store(qkv_ptr + together + dim, tl.load(own_ptr + own + dim, mask), mask)
    else:
        tl.store(own_ptr + own + dim, tl.load(qkv_ptr + together + dim, mask), mask)


@jit
def every_part(qkv_ptr, parts, tables, C: tl.constexpr, BACK: tl.constexpr):
    """`parts` are the arrays of queries, keys and values, `tables` cos and sin."""
    Q: tl.constexpr = C.Q
    K: tl.constexpr = C.K
    Q_TILE: tl.constexpr = C.Q_TILE
    K_TILE: tl.constexpr = C.K_TILE
    query_ptr, key_ptr, value_ptr = parts
    program = tl.program_id(0)
    if program < C.Q_PROGRAMS:
        turn(qkv_ptr, query_ptr, tables, program, (Q, 0), C, Q_TILE, BACK)
    elif program < C.Q_PROGRAMS + C.K_PROGRAMS:
        block = program - C.Q_PROGRAMS
        turn(qkv_ptr, key_ptr, tables, block, (K, Q), C, K_TILE, BACK)
    else:
        block = program - C.Q_PROGRAMS - C.K_PROGRAMS
        copy(qkv_ptr, value_ptr, block, (K, Q + K), C, BACK)


@jit
def qkv_rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, query_ptr, key_ptr, value_ptr, C: tl.constexpr
):
    parts, tables = (query_ptr, key_ptr, value_ptr), (cos_ptr, sin_ptr)
    every_part(qkv_ptr, parts, tables, C, False)


@jit
def qkv_rope_bwd_kernel(
    cos_ptr, sin_ptr, query_ptr, key_ptr, value_ptr, qkv_ptr, C: tl.constexpr
):
    parts, tables = (query_ptr, key_ptr, value_ptr), (cos_ptr, sin_ptr)
    every_part(qkv_ptr, parts, tables, C, True)


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
    known = Constants(
        NUM_TOKENS=tokens,
        Q=q,
        K=kv_heads,
        Q_PROGRAMS=for_queries,
        K_PROGRAMS=for_keys,
        HEAD=head,
        DIMS=next_power_of_2(h),
        Q_TILE=tile_of(q, together),
        K_TILE=tile_of(kv_heads, together),
    )
    return for_queries + 2 * for_keys, {"C": known, "num_warps": sizes["num_warps"]}


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
