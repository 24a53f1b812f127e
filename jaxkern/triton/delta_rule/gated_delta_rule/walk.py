"""The walks along the chunks of the gated delta rule: the state, and its gradient.

A program has some value columns of one value head. It keeps the state turned, S^T
[columns, h], in float32 registers, where it is the left operand of every product that
needs it, and so are r and d: between the products of a chunk nothing passes through
shared memory.

    r^T = v^T - from_start (S^T k^T)         d^T = (beta r^T) T^T
    out^T = scale from_start (S^T q^T) + (beta r^T) (P T)^T
    S^T <- from_start_C S^T + (to_end d^T) k

The other way the gradient D of the state after a chunk is kept, D^T [columns, h]:

    dr^T = dout^T (P T) + D^T (k^T to_end T)
    D^T <- from_start_C D^T + (scale from_start dout^T) q - (from_start beta dr^T) k

C is the problem's Constants. Tuples go with a walk: its `operands` and its `results`.
"""

from jaxkern.gpu.triton_call import jit, tl


@jit
def place_of_head(program, C: tl.constexpr):
    """(row of b and value head, first key row, first value row), in int64."""
    place = program.to(tl.int64)
    b, head = place // C.NUM_HEADS, place % C.NUM_HEADS
    key_row = b * C.T * C.NUM_KEY_HEADS + head // C.GROUP
    return place, key_row, b * C.T * C.NUM_HEADS + head


@jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns: none leaves its thread."""
    x = tl.reshape(x, (ROWS, 2, COLUMNS))
    return tl.split(tl.permute(x, (0, 2, 1)))


@jit
def load_turned_state(state_ptr, place, h, column, H: tl.constexpr, HV: tl.constexpr):
    at = place * H * HV + h[None, :] * HV + column[:, None]
    inside = (h < H)[None, :] & (column < HV)[:, None]
    return tl.load(state_ptr + at, inside, 0.0).to(tl.float32)


@jit
def store_turned_state(
    state_ptr, state, place, h, column, H: tl.constexpr, HV: tl.constexpr
):
    at = place * H * HV + h[None, :] * HV + column[:, None]
    inside = (h < H)[None, :] & (column < HV)[:, None]
    tl.store(state_ptr + at, state.to(state_ptr.dtype.element_ty), inside)


@jit
def store_of_chunk(
    states_ptr, state, place, h, column, H: tl.constexpr, HV: tl.constexpr
):
    """Turned, as the gradients need it: `[hv, h]`."""
    at = place * H * HV + column[:, None] * H + h[None, :]
    inside = (h < H)[None, :] & (column < HV)[:, None]
    tl.store(states_ptr + at, state, inside)


@jit
def places_of_chunk(chunk, h, column, C: tl.constexpr):
    """Where keys [64, h] and values, turned, [columns, 64] stand; which there are."""
    rows = chunk * 64 + tl.arange(0, 64)
    key_at = rows.to(tl.int64)[:, None] * (C.NUM_KEY_HEADS * C.H) + h[None, :]
    key_in = (rows < C.T)[:, None] & (h < C.H)[None, :]
    value_at = rows.to(tl.int64)[None, :] * (C.NUM_HEADS * C.HV) + column[:, None]
    value_in = (rows < C.T)[None, :] & (column < C.HV)[:, None]
    return key_at, key_in, value_at, value_in


@jit
def walk_forward(operands, results, program, first_column, C: tl.constexpr):
    """Leaves out and the final state, or the states before chunks and d (`written`)."""
    CHUNK: tl.constexpr = 64
    BLOCK_H: tl.constexpr = C.BLOCK_H
    BLOCK_V: tl.constexpr = C.BLOCK_V
    query_ptr, key_ptr, value_ptr, matrices_ptr, vectors_ptr, initial_ptr = operands
    out_ptr, final_ptr, states_ptr, written_ptr = results
    dtype = key_ptr.dtype.element_ty
    place, key_row, value_row = place_of_head(program, C)
    token, h = tl.arange(0, CHUNK), tl.arange(0, BLOCK_H)
    two = tl.arange(0, 2 * CHUNK)[:, None]
    column = first_column + tl.arange(0, BLOCK_V)
    state = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    if initial_ptr is not None:
        state += load_turned_state(initial_ptr, place, h, column, C.H, C.HV)
    key_ptr += key_row * C.H
    if out_ptr is not None:
        query_ptr += key_row * C.H
        out_ptr += value_row * C.HV
    else:
        written_ptr += value_row * C.HV
    value_ptr += value_row * C.HV
    for chunk in range(C.CHUNKS):
        key_at, key_in, value_at, value_in = places_of_chunk(chunk, h, column, C)
        here = place * C.CHUNKS + chunk
        matrices = matrices_ptr + here * 2 * CHUNK * CHUNK
        vectors = vectors_ptr + here * 4 * CHUNK
        from_start = tl.load(vectors + token)[None, :]
        to_end = tl.load(vectors + CHUNK + token)[None, :]
        beta = tl.load(vectors + 2 * CHUNK + token)[None, :]
        whole = tl.load(vectors + CHUNK - 1)
        low = state.to(dtype)
        if states_ptr is not None:
            store_of_chunk(states_ptr, low, here, h, column, C.H, C.HV)
        key = tl.load(key_ptr + key_at, key_in, 0.0)
        value = tl.load(value_ptr + value_at, value_in, 0.0)
        r = value.to(tl.float32) - from_start * tl.dot(low, tl.trans(key))
        r = (beta * r).to(dtype)
        if out_ptr is not None:
            # T above P T
            both = tl.load(matrices + two * CHUNK + token[None, :])
            d, within = halves(tl.dot(r, tl.trans(both)), BLOCK_V, CHUNK)
            query = tl.load(query_ptr + key_at, key_in, 0.0)
            out = C.SCALE * from_start * tl.dot(low, tl.trans(query)) + within
            tl.store(out_ptr + value_at, out.to(out_ptr.dtype.element_ty), value_in)
        else:
            inverse = tl.load(matrices + token[:, None] * CHUNK + token[None, :])
            d = tl.dot(r, tl.trans(inverse))
            tl.store(written_ptr + value_at, d.to(dtype), value_in)
        state = tl.dot((to_end * d).to(dtype), key, whole * state)
    if final_ptr is not None:
        store_turned_state(final_ptr, state, place, h, column, C.H, C.HV)


@jit
def walk_backward(
    operands, dfinal_ptr, results, program, first_column, C: tl.constexpr
):
    """Leaves D after each chunk, dr, and D before the first."""
    CHUNK: tl.constexpr = 64
    query_ptr, key_ptr, matrices_ptr, vectors_ptr, ends_ptr, dout_ptr = operands
    dinitial_ptr, dstates_ptr, dr_ptr = results
    dtype = key_ptr.dtype.element_ty
    place, key_row, value_row = place_of_head(program, C)
    token, h = tl.arange(0, CHUNK), tl.arange(0, C.BLOCK_H)
    column = first_column + tl.arange(0, C.BLOCK_V)
    dstate = load_turned_state(dfinal_ptr, place, h, column, C.H, C.HV)
    query_ptr += key_row * C.H
    key_ptr += key_row * C.H
    dout_ptr += value_row * C.HV
    dr_ptr += value_row * C.HV
    for step in range(C.CHUNKS):
        chunk = C.CHUNKS - 1 - step
        key_at, key_in, value_at, value_in = places_of_chunk(chunk, h, column, C)
        here = place * C.CHUNKS + chunk
        matrices = matrices_ptr + here * 2 * CHUNK * CHUNK
        vectors = vectors_ptr + here * 4 * CHUNK
        from_start = tl.load(vectors + token)[None, :]
        beta = tl.load(vectors + 2 * CHUNK + token)[None, :]
        whole = tl.load(vectors + CHUNK - 1)
        low = dstate.to(dtype)
        store_of_chunk(dstates_ptr, low, here, h, column, C.H, C.HV)
        tile = matrices + (CHUNK + token[:, None]) * CHUNK + token[None, :]
        dout = tl.load(dout_ptr + value_at, value_in, 0.0)
        dr = tl.dot(dout, tl.load(tile))
        end_at = (here * C.H + h[:, None]) * CHUNK + token[None, :]
        dr = tl.dot(low, tl.load(ends_ptr + end_at, (h < C.H)[:, None], 0.0), dr)
        key = tl.load(key_ptr + key_at, key_in, 0.0)
        tl.store(dr_ptr + value_at, dr.to(dtype), value_in)
        query = tl.load(query_ptr + key_at, key_in, 0.0)
        read = (C.SCALE * from_start * dout.to(tl.float32)).to(dtype)
        dstate = tl.dot(read, query, whole * dstate)
        dstate = tl.dot((-from_start * beta * dr).to(dtype), key, dstate)
    if dinitial_ptr is not None:
        store_turned_state(dinitial_ptr, dstate, place, h, column, C.H, C.HV)


@jit
def forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    matrices_ptr,
    vectors_ptr,
    initial_ptr,
    out_ptr,
    final_ptr,
    C: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C.HV + C.BLOCK_V - 1) // C.BLOCK_V
    walk_forward(
        (query_ptr, key_ptr, value_ptr, matrices_ptr, vectors_ptr, initial_ptr),
        (out_ptr, final_ptr, None, None),
        tl.program_id(0) // BLOCKS,
        tl.program_id(0) % BLOCKS * C.BLOCK_V,
        C,
    )


@jit
def both_ways_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    matrices_ptr,
    vectors_ptr,
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
    if tl.program_id(0) % 2 == 0:
        walk_backward(
            (query_ptr, key_ptr, matrices_ptr, vectors_ptr, ends_ptr, dout_ptr),
            dfinal_ptr,
            (dinitial_ptr, dstates_ptr, dr_ptr),
            program // BLOCKS,
            program % BLOCKS * C.BLOCK_V,
            C,
        )
    else:
        walk_forward(
            (query_ptr, key_ptr, value_ptr, matrices_ptr, vectors_ptr, initial_ptr),
            (None, None, states_ptr, written_ptr),
            program // BLOCKS,
            program % BLOCKS * C.BLOCK_V,
            C,
        )
