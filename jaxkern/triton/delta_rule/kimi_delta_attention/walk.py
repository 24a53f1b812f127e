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
def values_of_chunk(
    chunk, place, column, T: tl.constexpr, NUM_HEADS: tl.constexpr, HV: tl.constexpr
):
    """Where some columns of the values stand, turned, and which of them there are."""
    rows = (chunk * 64 + tl.arange(0, 64)).to(tl.int64)[None, :]
    columns = column[:, None]
    first = place // NUM_HEADS * T * NUM_HEADS + place % NUM_HEADS
    at = (first + rows * NUM_HEADS) * HV + columns
    return at, (rows < T) & (columns < HV)


@jit
def walk_forward(
    value_ptr,
    decayed_ptr,
    across_ptr,
    strength_ptr,
    matrices_ptr,
    initial_ptr,
    out_ptr,
    final_ptr,
    states_ptr,
    written_ptr,
    place,
    first_column,
    T: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Leaves out and the final state, or the states before chunks and y (`written`)."""
    CHUNK: tl.constexpr = 64
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    READ: tl.constexpr = 0
    ERASE: tl.constexpr = 1
    STORE: tl.constexpr = 2
    dtype = value_ptr.dtype.element_ty
    column = first_column + tl.arange(0, BLOCK_V)
    token, h = tl.arange(0, CHUNK), tl.arange(0, BLOCK_H)
    both_rows = tl.arange(0, 2 * CHUNK)[:, None]
    state = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    if initial_ptr is not None:
        state += load_turned_state(initial_ptr, place, h, column, H, HV)
    for chunk in range(CHUNKS):
        here = place * CHUNKS + chunk
        at, inside = values_of_chunk(chunk, place, column, T, NUM_HEADS, HV)
        matrices = matrices_ptr + here * 2 * CHUNK * CHUNK
        low = state.to(dtype)
        if states_ptr is not None:
            store_of_chunk(states_ptr, low, here, h, column, H, HV)
        erase = load_decayed(decayed_ptr, here, token, h, ERASE, H)
        value = tl.load(value_ptr + at, inside, 0.0)
        r = (value.to(tl.float32) - tl.dot(low, tl.trans(erase))).to(dtype)
        if out_ptr is not None:
            # Y above scale qk beta Y
            both = tl.load(matrices + both_rows * CHUNK + token[None, :])
            y, within = halves(tl.dot(r, tl.trans(both)), BLOCK_V, CHUNK)
            read = load_decayed(decayed_ptr, here, token, h, READ, H)
            out = SCALE * tl.dot(low, tl.trans(read)) + within
            tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)
        else:
            inverse = tl.load(matrices + token[:, None] * CHUNK + token[None, :])
            y = tl.dot(r, tl.trans(inverse))
            tl.store(written_ptr + at, y.to(dtype), inside)
        store = load_decayed(decayed_ptr, here, token, h, STORE, H)
        across = tl.load(across_ptr + here * H + h, h < H, 0.0)[None, :]
        beta = tl.load(strength_ptr + here * CHUNK + token)[None, :]
        state = tl.dot((beta * y).to(dtype), store, across * state)
    if final_ptr is not None:
        store_turned_state(final_ptr, state, place, h, column, H, HV)


@jit
def walk_backward(
    decayed_ptr,
    across_ptr,
    strength_ptr,
    matrices_ptr,
    ends_ptr,
    dout_ptr,
    dfinal_ptr,
    dinitial_ptr,
    dstates_ptr,
    dr_ptr,
    place,
    first_column,
    T: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Leaves D after each chunk and before the first, and dr."""
    CHUNK: tl.constexpr = 64
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    READ: tl.constexpr = 0
    ERASE: tl.constexpr = 1
    dtype = dout_ptr.dtype.element_ty
    token, h = tl.arange(0, CHUNK), tl.arange(0, BLOCK_H)
    column = first_column + tl.arange(0, BLOCK_V)
    dstate = load_turned_state(dfinal_ptr, place, h, column, H, HV)
    for step in range(CHUNKS):
        chunk = CHUNKS - 1 - step
        here = place * CHUNKS + chunk
        at, inside = values_of_chunk(chunk, place, column, T, NUM_HEADS, HV)
        low = dstate.to(dtype)
        store_of_chunk(dstates_ptr, low, here, h, column, H, HV)
        scores = matrices_ptr + (here * 2 + 1) * CHUNK * CHUNK
        scores += token[:, None] * CHUNK + token[None, :]
        dout = tl.load(dout_ptr + at, inside, 0.0)
        dr = tl.dot(dout, tl.load(scores))
        end_at = (here * H + h[:, None]) * CHUNK + token[None, :]
        dr = tl.dot(low, tl.load(ends_ptr + end_at, (h < H)[:, None], 0.0), dr)
        tl.store(dr_ptr + at, dr.to(dtype), inside)
        read = load_decayed(decayed_ptr, here, token, h, READ, H)
        scaled = (SCALE * dout.to(tl.float32)).to(dtype)
        across = tl.load(across_ptr + here * H + h, h < H, 0.0)[None, :]
        dstate = tl.dot(scaled, read, across * dstate)
        beta = tl.load(strength_ptr + here * CHUNK + token)[None, :]
        erase = load_decayed(decayed_ptr, here, token, h, ERASE, H)
        dstate = tl.dot((-beta * dr).to(dtype), erase, dstate)
    if dinitial_ptr is not None:
        store_turned_state(dinitial_ptr, dstate, place, h, column, H, HV)


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
    T: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
):
    BLOCKS: tl.constexpr = (HV + BLOCK_V - 1) // BLOCK_V
    walk_forward(
        value_ptr,
        decayed_ptr,
        across_ptr,
        strength_ptr,
        matrices_ptr,
        initial_ptr,
        out_ptr,
        final_ptr,
        None,
        None,
        (tl.program_id(0) // BLOCKS).to(tl.int64),
        tl.program_id(0) % BLOCKS * BLOCK_V,
        T,
        NUM_HEADS,
        H,
        HV,
        BLOCK_H,
        BLOCK_V,
        SCALE,
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
    T: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Neither walk of the backward pass needs the other: they run side by side."""
    BLOCKS: tl.constexpr = (HV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0) // 2
    place = (program // BLOCKS).to(tl.int64)
    first_column = program % BLOCKS * BLOCK_V
    if tl.program_id(0) % 2 == 0:
        walk_backward(
            decayed_ptr,
            across_ptr,
            strength_ptr,
            matrices_ptr,
            ends_ptr,
            dout_ptr,
            dfinal_ptr,
            dinitial_ptr,
            dstates_ptr,
            dr_ptr,
            place,
            first_column,
            T,
            NUM_HEADS,
            H,
            HV,
            BLOCK_H,
            BLOCK_V,
            SCALE,
        )
    else:
        walk_forward(
            value_ptr,
            decayed_ptr,
            across_ptr,
            strength_ptr,
            matrices_ptr,
            initial_ptr,
            None,
            None,
            states_ptr,
            written_ptr,
            place,
            first_column,
            T,
            NUM_HEADS,
            H,
            HV,
            BLOCK_H,
            BLOCK_V,
            SCALE,
        )
