"""Gradients of the operands of a chunk, from what the walks left; all chunks at once.

With S before and D after the chunk, as docs/design/kimi_delta_attention.md has them:

    kimi_pairs_kernel    dqk = scale dout d^T on and below the diagonal, with d = beta y
                         dkk = -dv d^T below it, with dv = beta dr; dkk + dkk^T, dqk^T
                         dbeta = y . dr, d, dv
    kimi_tokens_kernel   dread = scale dout S^T   derase = -dv S^T   dstore = d D^T
                         dq, dk and dg, from these and from dqk and dkk by levels

On a level a row of the second half of a block and a column of the first meet at the
middle (chunk_parts.py): with z = z e^-|G - G_middle| for queries and keys, the
gradients of z are products of the level's part of dqk and dkk + dkk^T with z. A decay
e^{G_i - G_j} gives G_i what it takes from G_j, so that dg, summed over the tokens from
each on, cancels what is between later tokens. Both are made of the z that products
took, rounded, and so cancel to float32.

A program of the second has the chunk of a value head and some channels. dkk^T and dqk^T
are computed or read turned: compilers have turned results of the matrix units wrongly.
C is the problem's Constants.
"""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.delta_rule.gated_delta_rule.gradients import (
    load_state,
    load_tokens,
)
from jaxkern.triton.delta_rule.kimi_delta_attention.chunk_parts import (
    chunk_of_program,
    decay_to_middle,
    is_second,
    meets,
    met,
)


@jit
def products(x_ptr, d_ptr, rows, inside, HV: tl.constexpr, BLOCK_V: tl.constexpr):
    """x d^T and d x^T of the tokens of a chunk."""
    CHUNK: tl.constexpr = 64
    found = tl.zeros((CHUNK, CHUNK), tl.float32)
    turned = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first in range(0, HV, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        x = load_tokens(x_ptr, rows, inside, columns, HV)
        d = load_tokens(d_ptr, rows, inside, columns, HV)
        found = tl.dot(x, tl.trans(d), found)
        turned = tl.dot(d, tl.trans(x), turned)
    return found, turned


@jit
def kimi_pairs_kernel(
    beta_ptr,
    dout_ptr,
    written_ptr,
    dr_ptr,
    d_ptr,
    dvalue_ptr,
    tiles_ptr,
    dbeta_ptr,
    C: tl.constexpr,
):
    CHUNK: tl.constexpr = 64
    dtype = dout_ptr.dtype.element_ty
    token = tl.arange(0, CHUNK)
    place, head, tokens, inside = chunk_of_program(C.T, C.NUM_HEADS)
    rows = tokens * C.NUM_HEADS + head
    beta = tl.load(beta_ptr + rows, inside, 0.0).to(tl.float32)
    dbeta = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, C.HV, C.BLOCK_V):
        columns = first + tl.arange(0, C.BLOCK_V)
        present = inside[:, None] & (columns < C.HV)[None, :]
        at = rows[:, None] * C.HV + columns[None, :]
        y = tl.load(written_ptr + at, present, 0.0).to(tl.float32)
        dr = tl.load(dr_ptr + at, present, 0.0).to(tl.float32)
        dbeta += tl.sum(y * dr, 1)
        tl.store(d_ptr + at, (beta[:, None] * y).to(dtype), present)
        tl.store(dvalue_ptr + at, (beta[:, None] * dr).to(dtype), present)
    tl.store(dbeta_ptr + rows, dbeta, inside)
    tl.debug_barrier()  # all of this program is stored before it is read
    row, column = token[:, None], token[None, :]
    tile = tiles_ptr + place * 3 * CHUNK * CHUNK + row * CHUNK + column
    dqk, turned = products(dout_ptr, d_ptr, rows, inside, C.HV, C.BLOCK_V)
    tl.store(tile, tl.where(row >= column, C.SCALE * dqk, 0.0).to(dtype))
    turned = tl.where(row < column, C.SCALE * turned, 0.0)
    tl.store(tile + 2 * CHUNK * CHUNK, turned.to(dtype))
    dkk, turned = products(dvalue_ptr, d_ptr, rows, inside, C.HV, C.BLOCK_V)
    dkk = tl.where(row > column, -1.0 * dkk, 0.0)
    dkk += tl.where(row < column, -1.0 * turned, 0.0)
    tl.store(tile + CHUNK * CHUNK, dkk.to(dtype))


@jit
def kimi_tokens_kernel(
    query_ptr,
    key_ptr,
    g_ptr,
    dout_ptr,
    total_ptr,
    states_ptr,
    d_ptr,
    dstates_ptr,
    dvalue_ptr,
    tiles_ptr,
    dquery_ptr,
    dkey_ptr,
    dg_ptr,
    C: tl.constexpr,
):
    """dquery and dkey of each value head."""
    CHUNK: tl.constexpr = 64
    BLOCK_H: tl.constexpr = C.BLOCK_H
    dtype = key_ptr.dtype.element_ty
    token = tl.arange(0, CHUNK)
    place, head, tokens, inside = chunk_of_program(C.T, C.NUM_HEADS)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = tokens * C.NUM_HEADS + head
    key_rows = tokens * C.NUM_KEY_HEADS + head // C.GROUP
    total_ptr += place * CHUNK * C.H

    dread = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    derase = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    dstore = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    dacross = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(0, C.HV, C.BLOCK_V):
        columns = first + tl.arange(0, C.BLOCK_V)
        state = load_state(states_ptr, place, columns, h, C.H, C.HV)
        dread = tl.dot(load_tokens(dout_ptr, rows, inside, columns, C.HV), state, dread)
        dvalue = load_tokens(dvalue_ptr, rows, inside, columns, C.HV)
        derase = tl.dot(dvalue, state, derase)
        dstate = load_state(dstates_ptr, place, columns, h, C.H, C.HV)
        d = load_tokens(d_ptr, rows, inside, columns, C.HV)
        dstore = tl.dot(d, dstate, dstore)
        dacross += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)

    there = (h < C.H)[None, :]
    total = tl.load(total_ptr + token[:, None] * C.H + h[None, :], there, 0.0)
    end = tl.load(total_ptr + (CHUNK - 1) * C.H + h, h < C.H, 0.0)
    query = load_tokens(query_ptr, key_rows, inside, h, C.H)
    key = load_tokens(key_ptr, key_rows, inside, h, C.H)
    dquery = C.SCALE * dread * tl.exp(total)
    dkey = -1.0 * derase * tl.exp(total)
    dtotal = dquery * query.to(tl.float32) + dkey * key.to(tl.float32)
    dstore *= tl.exp(end[None, :] - total)
    dkey += dstore
    dstore *= key.to(tl.float32)
    dtotal -= dstore
    # what every token of the chunk decays
    dend = tl.exp(end) * dacross + tl.sum(dstore, 0)

    tile = tiles_ptr + place * 3 * CHUNK * CHUNK
    itself = tl.load(tile + token * (CHUNK + 1)).to(tl.float32)[:, None]
    dquery += itself * key.to(tl.float32)
    dkey += itself * query.to(tl.float32)
    tile += token[:, None] * CHUNK + token[None, :]
    for level in range(1, 7):
        decay = decay_to_middle(total, total_ptr, token, h, level, C.H)
        keys = (key.to(tl.float32) * decay).to(dtype)
        queries = (query.to(tl.float32) * decay).to(dtype)
        near = meets(token, level)
        product = tl.dot(tl.load(tile, near, 0.0), keys)
        dquery += product * decay
        dtotal += product * queries.to(tl.float32)
        turned = met(token, level)
        dkk = tl.load(tile + CHUNK * CHUNK, near | turned, 0.0)
        product = tl.dot(dkk, keys)
        dqk = tl.load(tile + 2 * CHUNK * CHUNK, turned, 0.0)
        product = tl.dot(dqk, queries, product)
        dkey += product * decay
        product *= keys.to(tl.float32)
        later = is_second(token, level)[:, None]
        dtotal += tl.where(later, product, -product)

    at = rows[:, None] * C.H + h[None, :]
    present = inside[:, None] & there
    tl.store(dquery_ptr + at, dquery.to(dquery_ptr.dtype.element_ty), present)
    tl.store(dkey_ptr + at, dkey.to(dkey_ptr.dtype.element_ty), present)
    dg = tl.cumsum(dtotal, 0, reverse=True) + dend[None, :]
    # a factor 0 stays 0, whatever is rounded in sums over the tokens around it
    g = tl.load(g_ptr + at, present, 0.0).to(tl.float32)
    dg = tl.where(g < -120.0, 0.0, dg)
    tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), present)
