"""Gradients of the operands of a chunk, from what the walks left; all chunks at once.

With S before and D after the chunk, as docs/design/gated_delta_rule.md derives them:

    pairs_kernel    dqk = scale between (dout d^T)
                    dkk = -between (dr d^T), strictly lower; W = beta dkk
                    dv = beta dr, and what pairs give to dbeta and dg
    tokens_kernel   dq = scale from_start (dout S^T) + dqk k
                    dk = to_end (d D^T) - beta from_start (dr S^T)
                         + (W + W^T) k + dqk^T q

The first leaves dqk and W + W^T, a program for the chunk of a value head. In the
second a program has the chunk of a key head, for dq or for dk, and sums over the value
heads in registers. W^T is computed turned: compilers have turned results of the matrix
units wrongly. dg is a sum of parts: each kernel sums its share over the tokens after.

C is the problem's Constants. A gradient gets its `operands` and `results` as tuples.
"""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import (
    decay_between,
    running_decay,
)


@jit
def is_strong(beta):
    """Where dbeta is dr . d / beta: d is beta times what was read, with all its digits.

    Elsewhere it is a sum over the tokens before, each rounded, that may cancel.
    """
    return tl.abs(beta) >= 0.015625


@jit
def load_tokens(ptr, rows, inside, columns, D: tl.constexpr):
    """Rows of D numbers."""
    present = inside[:, None] & (columns < D)[None, :]
    return tl.load(ptr + rows[:, None] * D + columns[None, :], present, 0.0)


@jit
def load_state(ptr, place, column, h, H: tl.constexpr, HV: tl.constexpr):
    """Some columns and keys of a turned state."""
    present = (column < HV)[:, None] & (h < H)[None, :]
    at = place * H * HV + column[:, None] * H + h[None, :]
    return tl.load(ptr + at, present, 0.0)


@jit
def load_tile(tiles_ptr, place, token, WHICH: tl.constexpr):
    """dqk of a chunk, or W + W^T."""
    CHUNK: tl.constexpr = 64
    tile = tiles_ptr + (place * 2 + WHICH) * CHUNK * CHUNK
    return tl.load(tile + token[:, None] * CHUNK + token[None, :])


@jit
def pairs_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    g_ptr,
    beta_ptr,
    dout_ptr,
    written_ptr,
    dr_ptr,
    dvalue_ptr,
    tiles_ptr,
    dg_ptr,
    dbeta_ptr,
    C: tl.constexpr,
):
    CHUNK: tl.constexpr = 64
    HV: tl.constexpr = C.HV
    BLOCK_V: tl.constexpr = C.BLOCK_V
    chunk = tl.program_id(1)
    b = (tl.program_id(0) // C.NUM_HEADS).to(tl.int64)
    head = tl.program_id(0) % C.NUM_HEADS
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chunk
    token = tl.arange(0, CHUNK)
    tokens = b * C.T + chunk * CHUNK + token
    inside = chunk * CHUNK + token < C.T
    rows = tokens * C.NUM_HEADS + head
    key_rows = tokens * C.NUM_KEY_HEADS + head // C.GROUP
    total = running_decay(g_ptr, rows, inside)
    beta = tl.load(beta_ptr + rows, inside, 0.0).to(tl.float32)
    dbeta = tl.zeros((CHUNK,), tl.float32)
    dqk = tl.zeros((CHUNK, CHUNK), tl.float32)
    dkk = tl.zeros((CHUNK, CHUNK), tl.float32)
    dkk_turned = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first in tl.static_range(0, HV, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        dr = load_tokens(dr_ptr, rows, inside, columns, HV)
        value = load_tokens(value_ptr, rows, inside, columns, HV)
        dr_wide = dr.to(tl.float32)
        dbeta += tl.sum(dr_wide * value.to(tl.float32), 1)
        at = rows[:, None] * HV + columns[None, :]
        dvalue = (beta[:, None] * dr_wide).to(dvalue_ptr.dtype.element_ty)
        present = inside[:, None] & (columns < HV)[None, :]
        tl.store(dvalue_ptr + at, dvalue, present)
        d = load_tokens(written_ptr, rows, inside, columns, HV)
        dkk = tl.dot(dr, tl.trans(d), dkk)
        dkk_turned = tl.dot(d, tl.trans(dr), dkk_turned)
        dout = load_tokens(dout_ptr, rows, inside, columns, HV)
        dqk = tl.dot(dout, tl.trans(d), dqk)
    h = tl.arange(0, C.BLOCK_H)
    key = load_tokens(key_ptr, key_rows, inside, h, C.H)
    query = load_tokens(query_ptr, key_rows, inside, h, C.H)
    row, column = token[:, None], token[None, :]
    between = decay_between(total[:, None], total[None, :], row >= column)
    tile = tiles_ptr + place * 2 * CHUNK * CHUNK + row * CHUNK + column
    dqk *= C.SCALE * between
    tl.store(tile, dqk.to(tiles_ptr.dtype.element_ty))
    pairs = dqk * tl.dot(query, tl.trans(key))
    on_written = tl.sum(tl.where(row == column, dkk, 0.0), 1)
    dkk = tl.where(row > column, -between * dkk, 0.0)
    kk = tl.dot(key, tl.trans(key))
    dbeta += tl.sum(dkk * kk, 1)
    weighted = beta[:, None] * dkk
    pairs += weighted * kk
    dtotal = tl.sum(pairs, 1) - tl.sum(pairs, 0)
    between = decay_between(total[None, :], total[:, None], row < column)
    weighted -= beta[None, :] * between * dkk_turned
    tl.store(tile + CHUNK * CHUNK, weighted.to(tiles_ptr.dtype.element_ty))
    tl.store(dg_ptr + rows, tl.cumsum(dtotal, 0, reverse=True), inside)
    strong = is_strong(beta)
    dbeta = tl.where(strong, on_written / tl.where(strong, beta, 1.0), dbeta)
    tl.store(dbeta_ptr + rows, dbeta, inside)


@jit
def keys_of_chunk(query_ptr, key_ptr, chunk, b, k, h, C: tl.constexpr):
    """(tokens of a chunk, which there are, rows, queries and keys of a key head)."""
    token = tl.arange(0, 64)
    tokens = b * C.T + chunk * 64 + token
    inside = chunk * 64 + token < C.T
    key_rows = tokens * C.NUM_KEY_HEADS + k
    query = load_tokens(query_ptr, key_rows, inside, h, C.H)
    key = load_tokens(key_ptr, key_rows, inside, h, C.H)
    return tokens, inside, key_rows, query, key


@jit
def store_gradient(ptr, gradient, rows, inside, h, H: tl.constexpr):
    at = rows[:, None] * H + h[None, :]
    present = inside[:, None] & (h < H)[None, :]
    tl.store(ptr + at, gradient.to(ptr.dtype.element_ty), present)


@jit
def gradient_of_query(operands, results, chunk, b, k, h, C: tl.constexpr):
    CHUNK: tl.constexpr = 64
    HV: tl.constexpr = C.HV
    BLOCK_H: tl.constexpr = C.BLOCK_H
    BLOCK_V: tl.constexpr = C.BLOCK_V
    query_ptr, key_ptr, g_ptr, dout_ptr, states_ptr, tiles_ptr = operands
    dquery_ptr, dg_ptr = results
    tokens, inside, key_rows, query, key = keys_of_chunk(
        query_ptr, key_ptr, chunk, b, k, h, C
    )
    token = tl.arange(0, CHUNK)
    dquery = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    for v in range(C.GROUP):
        head = k * C.GROUP + v
        rows = tokens * C.NUM_HEADS + head
        place = (b * C.NUM_HEADS + head) * C.CHUNKS + chunk
        from_start = tl.exp(running_decay(g_ptr, rows, inside))
        read = tl.zeros((CHUNK, BLOCK_H), tl.float32)
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            dout = load_tokens(dout_ptr, rows, inside, columns, HV)
            state = load_state(states_ptr, place, columns, h, C.H, HV)
            read = tl.dot(dout, state, read)
        read *= C.SCALE * from_start[:, None]
        dtotal = tl.sum(read * query.to(tl.float32), 1)
        tl.store(dg_ptr + rows, tl.cumsum(dtotal, 0, reverse=True), inside)
        dquery = tl.dot(load_tile(tiles_ptr, place, token, 0), key, dquery + read)
    store_gradient(dquery_ptr, dquery, key_rows, inside, h, C.H)


@jit
def gradient_of_key(operands, walked, results, chunk, b, k, h, C: tl.constexpr):
    CHUNK: tl.constexpr = 64
    HV: tl.constexpr = C.HV
    BLOCK_H: tl.constexpr = C.BLOCK_H
    BLOCK_V: tl.constexpr = C.BLOCK_V
    query_ptr, key_ptr, g_ptr, beta_ptr = operands
    states_ptr, written_ptr, dstates_ptr, dr_ptr, tiles_ptr = walked
    dkey_ptr, dg_ptr, dbeta_ptr = results
    tokens, inside, key_rows, query, key = keys_of_chunk(
        query_ptr, key_ptr, chunk, b, k, h, C
    )
    token = tl.arange(0, CHUNK)
    dkey = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    for v in range(C.GROUP):
        head = k * C.GROUP + v
        rows = tokens * C.NUM_HEADS + head
        place = (b * C.NUM_HEADS + head) * C.CHUNKS + chunk
        total = running_decay(g_ptr, rows, inside)
        beta = tl.load(beta_ptr + rows, inside, 0.0).to(tl.float32)
        end = tl.sum(tl.where(token == CHUNK - 1, total, 0.0), 0)
        products = tl.zeros((CHUNK, BLOCK_H), tl.float32)
        across = 0.0
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            dr = load_tokens(dr_ptr, rows, inside, columns, HV)
            state = load_state(states_ptr, place, columns, h, C.H, HV)
            dstate = load_state(dstates_ptr, place, columns, h, C.H, HV)
            across += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            products = tl.dot(dr, state, products)
        products *= tl.exp(total)[:, None]  # erased
        on_key = tl.sum(products * key.to(tl.float32), 1)
        dkey -= beta[:, None] * products
        products = tl.zeros((CHUNK, BLOCK_H), tl.float32)
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            d = load_tokens(written_ptr, rows, inside, columns, HV)
            dstate = load_state(dstates_ptr, place, columns, h, C.H, HV)
            products = tl.dot(d, dstate, products)
        products *= tl.exp(end - total)[:, None]  # stored
        to_state = tl.sum(products * key.to(tl.float32), 1)
        dkey = tl.dot(load_tile(tiles_ptr, place, token, 1), key, dkey + products)
        dqk = load_tile(tiles_ptr, place, token, 0)
        dkey = tl.dot(tl.trans(dqk), query, dkey)
        # what decays at l: the sum over tokens from l on, to the end or across
        dg = tl.cumsum(-beta * on_key - to_state, 0, reverse=True)
        dg += tl.exp(end) * across + tl.sum(to_state, 0)
        tl.store(dg_ptr + rows, dg, inside)
        dbeta = tl.where(is_strong(beta), 0.0, -on_key)
        tl.store(dbeta_ptr + rows, dbeta, inside)
    store_gradient(dkey_ptr, dkey, key_rows, inside, h, C.H)


@jit
def tokens_kernel(
    query_ptr,
    key_ptr,
    g_ptr,
    beta_ptr,
    dout_ptr,
    states_ptr,
    written_ptr,
    dstates_ptr,
    dr_ptr,
    tiles_ptr,
    dquery_ptr,
    dkey_ptr,
    dg_ptr,
    dbeta_ptr,
    C: tl.constexpr,
):
    """Part 2 i of dg comes from block i of the dims of queries, 2 i + 1 of keys."""
    PARTS: tl.constexpr = (C.H + C.BLOCK_H - 1) // C.BLOCK_H
    which = tl.program_id(0) % (2 * PARTS)
    row = tl.program_id(0) // (2 * PARTS)
    b, k = (row // C.NUM_KEY_HEADS).to(tl.int64), row % C.NUM_KEY_HEADS
    h = which // 2 * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    tokens = (tl.num_programs(0) // (2 * PARTS)).to(tl.int64) * C.GROUP * C.T
    if which % 2 == 0:
        gradient_of_query(
            (query_ptr, key_ptr, g_ptr, dout_ptr, states_ptr, tiles_ptr),
            (dquery_ptr, dg_ptr + which * tokens),
            tl.program_id(1),
            b,
            k,
            h,
            C,
        )
    else:
        gradient_of_key(
            (query_ptr, key_ptr, g_ptr, beta_ptr),
            (states_ptr, written_ptr, dstates_ptr, dr_ptr, tiles_ptr),
            (dkey_ptr, dg_ptr + which * tokens, dbeta_ptr + which // 2 * tokens),
            tl.program_id(1),
            b,
            k,
            h,
            C,
        )
