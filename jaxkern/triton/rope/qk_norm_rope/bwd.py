"""Gradients of qk_norm_rope, of queries and keys in one launch.

    back = dy, its pairs turned back;  dweight = sum over heads of back * xhat
    dxhat = back * (weight + offset);  dx = (dxhat - xhat * mean(dxhat * xhat)) * rstd

xhat is x * rstd. A program holds whole heads in registers: x and dy are read once, dx
is written once. It walks over many heads, so that the gradient of a weight costs one
partial sum a program. The first programs take the queries, the others the keys.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import num_sms
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.primitives.rope.qk_norm_rope import (
    HeadsAndTables,
    qk_norm_rope_bwd_reference,
)
from jaxkern.triton.norm.row_tiles import summed
from jaxkern.triton.rope.head_tiles import (
    head_of,
    heads_and_tokens,
    heads_of,
    over_heads,
    read_angles,
    read_pairs,
    read_rest,
    sizes_of,
    tile_of,
    write_pairs,
    write_rest,
)
from jaxkern.triton.rope.qk_norm_rope.fwd import unsupported as unsupported


@jit
def turn_and_norm_back(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dweight_ptr,
    program,
    NUM_TOKENS: tl.constexpr,
    N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of every PROGRAMS-th block of heads, from the `program`-th."""
    H: tl.constexpr = HEAD[0]
    PAIRS: tl.constexpr = HEAD[3]
    REST: tl.constexpr = HEAD[4]
    RUNS: tl.constexpr = TILE[0]
    HEADS: tl.constexpr = TILE[1]
    one = tl.zeros([1, 1, 1], tl.int64)
    if weight_ptr is not None:
        wa, wb = read_pairs(weight_ptr, one, one == 0, HEAD, (1, 1))
        wa += OFFSET
        wb += OFFSET
        if REST:
            w = read_rest(weight_ptr, one, one == 0, HEAD) + OFFSET
    if dweight_ptr is not None:
        dwa = tl.zeros([RUNS, HEADS, PAIRS], tl.float32)
        dwb = tl.zeros([RUNS, HEADS, PAIRS], tl.float32)
        if REST:
            dw = tl.zeros([RUNS, HEADS, REST], tl.float32)
    num_blocks: tl.constexpr = (NUM_TOKENS * N + RUNS * HEADS - 1) // (RUNS * HEADS)
    for block in tl.range(program, num_blocks, PROGRAMS, num_stages=STAGES):
        head, token = heads_of(block, N, TILE)
        present = head < NUM_TOKENS * N
        start = head * H
        a, b = read_pairs(x_ptr, start, present, HEAD, TILE)
        ya, yb = read_pairs(dy_ptr, start, present, HEAD, TILE)
        cos = read_angles(cos_ptr, token, NUM_TOKENS, HEAD)
        sin = read_angles(sin_ptr, token, NUM_TOKENS, HEAD)
        rstd = tl.load(rstd_ptr + head, present, 0.0)
        a *= rstd
        b *= rstd
        da, db = ya * cos + yb * sin, yb * cos - ya * sin
        if dweight_ptr is not None:
            dwa += da * a
            dwb += db * b
        if weight_ptr is not None:
            da *= wa
            db *= wb
        along = tl.sum(da * a + db * b, 2, keep_dims=True)
        if REST:
            rest = read_rest(x_ptr, start, present, HEAD) * rstd
            drest = read_rest(dy_ptr, start, present, HEAD)
            if dweight_ptr is not None:
                dw += drest * rest
            if weight_ptr is not None:
                drest *= w
            along += tl.sum(drest * rest, 2, keep_dims=True)
        if dx_ptr is not None:
            along /= HEAD[0]
            da, db = (da - a * along) * rstd, (db - b * along) * rstd
            write_pairs(dx_ptr, start, present, da, db, HEAD, TILE)
            if REST:
                drest = (drest - rest * along) * rstd
                write_rest(dx_ptr, start, present, drest, HEAD)
    if dweight_ptr is not None:
        at = one + program * H
        dwa, dwb = over_heads(dwa), over_heads(dwb)
        write_pairs(dweight_ptr, at, one == 0, dwa, dwb, HEAD, (1, 1))
        if REST:
            write_rest(dweight_ptr, at, one == 0, over_heads(dw), HEAD)


@jit
def qk_norm_rope_bwd_kernel(
    query_ptr,
    key_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    query_rstd_ptr,
    key_rstd_ptr,
    dy_query_ptr,
    dy_key_ptr,
    dquery_ptr,
    dkey_ptr,
    dquery_weight_ptr,
    dkey_weight_ptr,
    NUM_TOKENS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    KEY_PROGRAMS: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    if program < QUERY_PROGRAMS:
        turn_and_norm_back(
            query_ptr,
            query_weight_ptr,
            cos_ptr,
            sin_ptr,
            query_rstd_ptr,
            dy_query_ptr,
            dquery_ptr,
            dquery_weight_ptr,
            program,
            NUM_TOKENS,
            N,
            QUERY_PROGRAMS,
            OFFSET,
            HEAD,
            QUERY_TILE,
            STAGES,
        )
    elif key_ptr is not None:
        turn_and_norm_back(
            key_ptr,
            key_weight_ptr,
            cos_ptr,
            sin_ptr,
            key_rstd_ptr,
            dy_key_ptr,
            dkey_ptr,
            dkey_weight_ptr,
            program - QUERY_PROGRAMS,
            NUM_TOKENS,
            K,
            KEY_PROGRAMS,
            OFFSET,
            HEAD,
            KEY_TILE,
            STAGES,
        )


def qk_norm_rope_gradients(
    operands: Sequence[jax.Array | None],
    tables: Sequence[jax.Array],
    rstds: Sequence[jax.Array | None],
    dys: Sequence[jax.Array | None],
    wanted: Sequence[bool],
    offset: float,
    pairing: str,
    pair_offset: int,
) -> tuple[jax.Array | None, ...]:
    """Gradients of (query, key, query_weight, key_weight), where wanted."""
    query, key, *weights = operands
    assert query is not None
    h = query.shape[-1]
    heads, key_heads, tokens = heads_and_tokens(query, key)
    head = head_of(h, tables[0].shape[-1], pairing, pair_offset)
    sizes = sizes_of(head, 4096)
    together, in_all = sizes["TOGETHER"], num_sms() * sizes["WAVES"]
    # queries and keys get programs in proportion to their heads
    programs = [
        min(max(in_all * n // max(heads + key_heads, 1), 1), -(-tokens * n // together))
        for n in (heads, key_heads)
    ]
    names = ("query", "key", "query_weight", "key_weight")
    read = (*names, "cos", "sin", "query_rstd", "key_rstd", "dy_query", "dy_key")
    given = dict(zip(read, (*operands, *tables, *rstds, *dys), strict=True))
    shapes = [
        like(query),
        like(key),
        *(jax.ShapeDtypeStruct((n, h), jnp.float32) for n in programs),
    ]
    results = {
        f"d{n}_ptr": shape if w and x is not None else None
        for n, shape, x, w in zip(names, shapes, operands, wanted, strict=True)
    }
    constants = {
        "NUM_TOKENS": tokens,
        "N": heads,
        "K": key_heads,
        "QUERY_PROGRAMS": programs[0],
        "KEY_PROGRAMS": programs[1],
        "OFFSET": offset,
        "HEAD": head,
        "QUERY_TILE": tile_of(heads, together),
        "KEY_TILE": tile_of(key_heads, together),
        "STAGES": sizes["STAGES"],
        "num_warps": sizes["num_warps"],
    }
    dquery, dkey, *partial = sparse_call(
        qk_norm_rope_bwd_kernel,
        (sum(programs),),
        {f"{n}_ptr": x for n, x in given.items()},
        results,
        constants,
    )
    return dquery, dkey, *map(summed, partial, weights)


def qk_norm_rope_bwd(*arrays, eps, offset, pairing, pair_offset, at_end, wanted):
    """`arrays`: those of HeadsAndTables, then rstd and dy, of queries and of keys."""
    o, rstds, dys = HeadsAndTables(*arrays[:6]), arrays[6:8], arrays[8:]
    options = {"offset": offset, "pairing": pairing, "pair_offset": pair_offset}
    grads = (None,) * 4
    if any(wanted[:4]):
        grads = qk_norm_rope_gradients(o[:4], o[4:], rstds, dys, wanted[:4], **options)
    dtables = (None, None)
    if any(wanted[4:]):  # a learned table is rare: left to XLA
        *_, dcos, dsin = qk_norm_rope_bwd_reference(
            o, *rstds, *dys, eps=eps, at_end=at_end, **options
        )
        dtables = dcos, dsin
    return *grads, *dtables
