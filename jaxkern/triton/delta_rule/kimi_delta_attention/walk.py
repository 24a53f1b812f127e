"""The walks along the chunks of Kimi delta attention: the state, and its gradient.

A program has some value columns of one value head and keeps the state turned, S^T
[columns, h], in float32 registers, as the walks of the gated delta rule do, whose
lines these are but for the decays, which chunk_parts.py has put into read, erase and
store, and for the strength of a token, which comes after its solution:

    r^T = v^T - S^T erase^T            y^T = r^T Y^T            d = beta y
    out^T = scale S^T read^T + r^T (scale qk beta Y)^T
    S^T <- across S^T + d^T store

The other way the gradient D of the state after a chunk is kept, D^T [columns, h]:

    dr^T = dout^T (scale qk T) + D^T (store^T T)
    D^T <- across D^T + (scale dout^T) read - (beta dr^T) erase

C is the problem's Constants. Tuples go with a walk: `parts` of chunk_parts.py with
the state before or the ends, and its `results`.
"""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.delta_rule.gated_delta_rule.walk import (
    halves,
    load_turned_state,
    store_of_chunk,
    store_turned_state,
)


@jit
def load_decayed(decayed_ptr, place, token, h, WHICH: tl.constexpr, H: tl.constexpr):
    """read, erase or store of a chunk."""
    CHUNK: tl.constexpr = 64
    at = (place * 3 + WHICH) * CHUNK * H + token[:, None] * H + h[None, :]
    return tl.load(decayed_ptr + at, (h < H)[None, :], 0.0)


@jit
def values_of_chunk(chunk, place, column, C: tl.constexpr):
    """Where some columns of the values stand, turned, and which of them there are."""
    rows = (chunk * 64 + tl.arange(0, 64)).to(tl.int64)[None, :]
    columns = column[:, None]
    first = place // C.NUM_HEADS * C.T * C.NUM_HEADS + place % C.NUM_HEADS
    at = (first + rows * C.NUM_HEADS) * C.HV + columns
    return at, (rows < C.T) & (columns < C.HV)


@jit
def walk_forward(value_ptr, parts, results, place, first_column, C: tl.constexpr):
    """Leaves out and the final state, or the states before chunks and y (`written`)."""
    CHUNK: tl.constexpr = 64
    READ: tl.constexpr = 0
    ERASE: tl.constexpr = 1
    STORE: tl.constexpr = 2
    BLOCK_H: tl.constexpr = C.BLOCK_H
    BLOCK_V: tl.constexpr = C.BLOCK_V
    decayed_ptr, across_ptr, strength_ptr, matrices_ptr, initial_ptr = parts
    out_ptr, final_ptr, states_ptr, written_ptr = results
    dtype = value_ptr.dtype.element_ty
    column = first_column + tl.arange(0, BLOCK_V)
    token, h = tl.arange(0, CHUNK), tl.arange(0, BLOCK_H)
    both_rows = tl.arange(0, 2 * CHUNK)[:, None]
    state = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    if initial_ptr is not None:
        state += load_turned_state(initial_ptr, place, h, column, C.H, C.HV)
    for chunk in range(C.CHUNKS):
        here = place * C.CHUNKS + chunk
        at, inside = values_of_chunk(chunk, place, column, C)
        matrices = matrices_ptr + here * 2 * CHUNK * CHUNK
        low = state.to(dtype)
        if states_ptr is not None:
            store_of_chunk(states_ptr, low, here, h, column, C.H, C.HV)
        erase = load_decayed(decayed_ptr, here, token, h, ERASE, C.H)
        value = tl.load(value_ptr + at, inside, 0.0)
        r = (value.to(tl.float32) - tl.dot(low, tl.trans(erase))).to(dtype)
        if out_ptr is not None:
            # Y above scale qk beta Y
            both = tl.load(matrices + both_rows * CHUNK + token[None, :])
            y, within = halves(tl.dot(r, tl.trans(both)), BLOCK_V, CHUNK)
            read = load_decayed(decayed_ptr, here, token, h, READ, C.H)
            out = C.SCALE * tl.dot(low, tl.trans(read)) + within
            tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)
        else:
            inverse = tl.load(matrices + token[:, None] * CHUNK + token[None, :])
            y = tl.dot(r, tl.trans(inverse))
            tl.store(written_ptr + at, y.to(dtype), inside)
        store = load_decayed(decayed_ptr, here, token, h, STORE, C.H)
        across = tl.load(across_ptr + here * C.H + h, h < C.H, 0.0)[None, :]
        beta = tl.load(strength_ptr + here * CHUNK + token)[None, :]
        state = tl.dot((beta * y).to(dtype), store, across * state)
    if final_ptr is not None:
        store_turned_state(final_ptr, state, place, h, column, C.H, C.HV)


@jit
def walk_backward(parts, douts, results, place, first_column, C: tl.constexpr):
    """Leaves D after each chunk and before the first, and dr."""
    CHUNK: tl.constexpr = 64
    READ: tl.constexpr = 0
    ERASE: tl.constexpr = 1
    decayed_ptr, across_ptr, strength_ptr, matrices_ptr, ends_ptr = parts
    dout_ptr, dfinal_ptr = douts
    dinitial_ptr, dstates_ptr, dr_ptr = results
    dtype = dout_ptr.dtype.element_ty
    token, h = tl.arange(0, CHUNK), tl.arange(0, C.BLOCK_H)
    column = first_column + tl.arange(0, C.BLOCK_V)
    dstate = load_turned_state(dfinal_ptr, place, h, column, C.H, C.HV)
    for step in range(C.CHUNKS):
        chunk = C.CHUNKS - 1 - step
        here = place * C.CHUNKS + chunk
        at, inside = values_of_chunk(chunk, place, column, C)
        low = dstate.to(dtype)
        store_of_chunk(dstates_ptr, low, here, h, column, C.H, C.HV)
        scores = matrices_ptr + (here * 2 + 1) * CHUNK * CHUNK
        scores += token[:, None] * CHUNK + token[None, :]
        dout = tl.load(dout_ptr + at, inside, 0.0)
        dr = tl.dot(dout, tl.load(scores))
        end_at = (here * C.H + h[:, None]) * CHUNK + token[None, :]
        dr = tl.dot(low, tl.load(ends_ptr + end_at, (h < C.H)[:, None], 0.0), dr)
        tl.store(dr_ptr + at, dr.to(dtype), inside)
        read = load_decayed(decayed_ptr, here, token, h, READ, C.H)
        scaled = (C.SCALE * dout.to(tl.float32)).to(dtype)
        across = tl.load(across_ptr + here * C.H + h, h < C.H, 0.0)[None, :]
        dstate = tl.dot(scaled, read, across * dstate)
        beta = tl.load(strength_ptr + here * CHUNK + token)[None, :]
        erase = load_decayed(decayed_ptr, here, token, h, ERASE, C.H)
        dstate = tl.dot((-beta * dr).to(dtype), erase, dstate)
    if dinitial_ptr is not None:
        store_turned_state(dinitial_ptr, dstate, place, h, column, C.H, C.HV)


@jit
def kimi_forward_kernel(
    value_ptr,
    decayed_ptr,
    across_ptr,
    strength_ptr,
    matrices_ptr,
    initial_ptr,
    out_ptr,
    final_ptr,
    C: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C.HV + C.BLOCK_V - 1) // C.BLOCK_V
    walk_forward(
        value_ptr,
        (decayed_ptr, across_ptr, strength_ptr, matrices_ptr, initial_ptr),
        (out_ptr, final_ptr, None, None),
        (tl.program_id(0) // BLOCKS).to(tl.int64),
        tl.program_id(0) % BLOCKS * C.BLOCK_V,
        C,
    )


@jit
def kimi_both_ways_kernel(
    value_ptr,
    decayed_ptr,
    across_ptr,
    strength_ptr,
    matrices_ptr,
    ends_ptr,
    initial_ptr,
    dout_ptr,
    dfinal_ptr,
    states_ptr,
    written_ptr,
    dstates_ptr,
    dr_ptr,
    dinitial_ptr,
    C: tl.constexpr,
):
    """Neither walk of the backward pass needs the other: they run side by side."""
    BLOCKS: tl.constexpr = (C.HV + C.BLOCK_V - 1) // C.BLOCK_V
    program = tl.program_id(0) // 2
    place = (program // BLOCKS).to(tl.int64)
    first_column = program % BLOCKS * C.BLOCK_V
    if tl.program_id(0) % 2 == 0:
        walk_backward(
            (decayed_ptr, across_ptr, strength_ptr, matrices_ptr, ends_ptr),
            (dout_ptr, dfinal_ptr),
            (dinitial_ptr, dstates_ptr, dr_ptr),
            place,
            first_column,
            C,
        )
    else:
        walk_forward(
            value_ptr,
            (decayed_ptr, across_ptr, strength_ptr, matrices_ptr, initial_ptr),
            (None, None, states_ptr, written_ptr),
            place,
            first_column,
            C,
        )
