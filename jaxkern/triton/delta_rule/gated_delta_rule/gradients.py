"""Gradients of the operands of a chunk, from what the walks left; all chunks at once.

With S before and D after the chunk, as docs/design/gated_delta_rule.md derives them:

    dqk = scale between (dout d^T)           dkk = -between (dr d^T), strictly lower
    read = scale from_start (dout S^T)       erased = from_start (dr S^T)
    stored = to_end (d D^T)

A program has the chunk of a key head and some dims h of its keys, and sums over the
value heads in registers. Where dqk or dkk are needed turned they are computed turned:
compilers have turned results of the matrix units wrongly.
"""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import (
    decay_between,
    running_decay,
)


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
def gradients_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    g_ptr,
    beta_ptr,
    dout_ptr,
    states_ptr,
    written_ptr,
    dstates_ptr,
    dr_ptr,
    dquery_ptr,
    dkey_ptr,
    dvalue_ptr,
    dg_ptr,
    dbeta_ptr,
    T: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
):
    CHUNK: tl.constexpr = 64
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    NUM_HEADS: tl.constexpr = NUM_KEY_HEADS * GROUP
    PARTS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    dtype = key_ptr.dtype.element_ty
    part, chunk = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    k = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    token = tl.arange(0, CHUNK)
    tokens = (chunk * CHUNK + token).to(tl.int64)
    inside = tokens < T
    h = part * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = (b * T + tokens) * NUM_KEY_HEADS + k
    query = load_tokens(query_ptr, rows, inside, h, H)
    key = load_tokens(key_ptr, rows, inside, h, H)
    if PARTS == 1:
        qk = tl.dot(query, tl.trans(key))
        kk = tl.dot(key, tl.trans(key))
    else:
        qk = tl.zeros((CHUNK, CHUNK), tl.float32)
        kk = tl.zeros((CHUNK, CHUNK), tl.float32)
        for other in tl.static_range(PARTS):
            dims = other * BLOCK_H + tl.arange(0, BLOCK_H)
            some = load_tokens(key_ptr, rows, inside, dims, H)
            asked = load_tokens(query_ptr, rows, inside, dims, H)
            qk = tl.dot(asked, tl.trans(some), qk)
            kk = tl.dot(some, tl.trans(some), kk)
    dquery = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    dkey = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    for v in range(GROUP):
        head = k * GROUP + v
        rows_v = (b * T + tokens) * NUM_HEADS + head
        place = (b * NUM_HEADS + head) * CHUNKS + chunk
        total = running_decay(g_ptr, rows_v, inside)
        beta = tl.load(beta_ptr + rows_v, inside, 0.0).to(tl.float32)
        end = tl.sum(tl.where(token == CHUNK - 1, total, 0.0), 0)
        from_start, to_end = tl.exp(total), tl.exp(end - total)

        # of pairs of tokens
        row, column = token[:, None], token[None, :]
        dtotal = tl.zeros((CHUNK,), tl.float32)
        dbeta = tl.zeros((CHUNK,), tl.float32)
        between = decay_between(total[:, None], total[None, :], row >= column)
        dqk = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            dout = load_tokens(dout_ptr, rows_v, inside, columns, HV)
            d = load_tokens(written_ptr, rows_v, inside, columns, HV)
            dqk = tl.dot(dout, tl.trans(d), dqk)
        dqk *= SCALE * between
        dquery = tl.dot(dqk.to(dtype), key, dquery)
        pairs = dqk * qk
        dkk = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            d = load_tokens(written_ptr, rows_v, inside, columns, HV)
            dr = load_tokens(dr_ptr, rows_v, inside, columns, HV)
            dkk = tl.dot(dr, tl.trans(d), dkk)
        dkk = tl.where(row > column, -between * dkk, 0.0)
        weighted = beta[:, None] * dkk
        if part == 0:
            pairs += weighted * kk
            dbeta += tl.sum(dkk * kk, 1)
            dtotal += tl.sum(pairs, 1) - tl.sum(pairs, 0)
        between = decay_between(total[None, :], total[:, None], row <= column)
        dkk = tl.zeros((CHUNK, CHUNK), tl.float32)  # turned, as dqk below
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            d = load_tokens(written_ptr, rows_v, inside, columns, HV)
            dr = load_tokens(dr_ptr, rows_v, inside, columns, HV)
            dkk = tl.dot(d, tl.trans(dr), dkk)
        weighted -= tl.where(row < column, beta[None, :] * between * dkk, 0.0)
        dkey = tl.dot(weighted.to(dtype), key, dkey)
        dqk = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            dout = load_tokens(dout_ptr, rows_v, inside, columns, HV)
            d = load_tokens(written_ptr, rows_v, inside, columns, HV)
            dqk = tl.dot(d, tl.trans(dout), dqk)
        dkey = tl.dot((SCALE * between * dqk).to(dtype), query, dkey)

        # of tokens and the states around the chunk
        read = tl.zeros((CHUNK, BLOCK_H), tl.float32)
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            dout = load_tokens(dout_ptr, rows_v, inside, columns, HV)
            state = load_state(states_ptr, place, columns, h, H, HV)
            read = tl.dot(dout, state, read)
        read *= SCALE * from_start[:, None]
        dquery += read
        dtotal += tl.sum(read * query.to(tl.float32), 1)
        erased = tl.zeros((CHUNK, BLOCK_H), tl.float32)
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            dr = load_tokens(dr_ptr, rows_v, inside, columns, HV)
            state = load_state(states_ptr, place, columns, h, H, HV)
            erased = tl.dot(dr, state, erased)
            if part == 0:
                value = load_tokens(value_ptr, rows_v, inside, columns, HV)
                dr_wide = dr.to(tl.float32)
                dbeta += tl.sum(dr_wide * value.to(tl.float32), 1)
                at = rows_v[:, None] * HV + columns[None, :]
                dvalue = (beta[:, None] * dr_wide).to(dvalue_ptr.dtype.element_ty)
                present = inside[:, None] & (columns < HV)[None, :]
                tl.store(dvalue_ptr + at, dvalue, present)
        erased *= from_start[:, None]
        dkey -= beta[:, None] * erased
        on_key = tl.sum(erased * key.to(tl.float32), 1)
        dbeta -= on_key
        dtotal -= beta * on_key
        stored = tl.zeros((CHUNK, BLOCK_H), tl.float32)
        across = 0.0
        for first in tl.static_range(0, HV, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            d = load_tokens(written_ptr, rows_v, inside, columns, HV)
            state = load_state(states_ptr, place, columns, h, H, HV)
            dstate = load_state(dstates_ptr, place, columns, h, H, HV)
            across += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            stored = tl.dot(d, dstate, stored)
        stored *= to_end[:, None]
        dkey += stored
        to_state = tl.sum(stored * key.to(tl.float32), 1)
        dtotal -= to_state

        # what decays at l: the sum over tokens from l on, to the end or across
        whole = tl.exp(end) * across + tl.sum(to_state, 0)
        dg = tl.cumsum(dtotal, 0, reverse=True) + whole
        g = tl.load(g_ptr + rows_v, inside, 0.0).to(tl.float32)
        dg = tl.where(g < -120.0, 0.0, dg)
        to = part.to(tl.int64) * tl.num_programs(2) * T * NUM_HEADS + rows_v
        tl.store(dg_ptr + to, dg, inside)
        tl.store(dbeta_ptr + to, dbeta, inside)
    at = rows[:, None] * H + h[None, :]
    present = inside[:, None] & (h < H)[None, :]
    tl.store(dquery_ptr + at, dquery.to(dquery_ptr.dtype.element_ty), present)
    tl.store(dkey_ptr + at, dkey.to(dkey_ptr.dtype.element_ty), present)
