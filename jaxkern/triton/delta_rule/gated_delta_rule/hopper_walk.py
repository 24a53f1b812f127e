"""The walks of walk.py for GPUs of compute capability 9.0, every layout written out.

The formulas and the programs are the same. What Triton leaves undone is done here: a
product runs while what need not wait for it is computed, four warps beside those of the
walk copy chunks `stages` - 1 ahead, and results reach rows of memory through one tile
of shared memory.

Tuples go with a walk: `pointers` to keys, queries, values (or dout), matrices, vectors
and ends, and `buffers` of shared memory for `stages` chunks of them, T and P T apart.
What a WALK ("out", "states" or "back") has none of is the keys' again.

With `together` = 2 a program has both blocks of a head's value columns, each walked by
four warps of its own: what both read comes once, and one multiplies while the other
waits.
"""

from jaxkern.gpu.triton_call import (
    constexpr_function,
    gl,
    gluon_jit,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.delta_rule.gated_delta_rule.hopper_tiles import (
    all_was_read,
    copies_layout,
    copy_matrix,
    copy_rows,
    copy_vectors,
    is_strong,
    places,
    ring,
    room_for,
    room_for_vectors,
    store_rows,
    tokens_left,
    wait_for_copies,
    wait_for_room,
    will_come,
)
from jaxkern.triton.delta_rule.gated_delta_rule.ready_chunks import wait_until_ready


@constexpr_function
def sums_layout(columns):
    """Of a product `[64, columns]` of the four warps together."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon_jit
def at_head(pointers, program, P: gl.constexpr):
    """`pointers` from a value head's first token or chunk on, and which head it is."""
    keys, queries, values, matrices, vectors, ends = pointers
    place = program.to(gl.int64)
    b, head = place // P.heads, place % P.heads
    key_row = (b * P.tokens * (P.heads // P.group) + head // P.group) * P.h
    value_row = (b * P.tokens * P.heads + head) * P.hv
    keys += key_row
    queries += key_row
    values += value_row
    matrices += place * (P.chunks * P.lines * 64)
    vectors += place * (P.chunks * 4 * 64)
    ends += place * (P.chunks * P.h * 64)
    return (keys, queries, values, matrices, vectors, ends), place, value_row


@gluon_jit
def copy_chunk(
    chunk, slot, first_column, pointers, buffers, WALK: gl.constexpr, P: gl.constexpr
):
    """Starts the copies of a chunk."""
    left = tokens_left(chunk, P)
    first = gl.to_tensor(chunk).to(gl.int64) * 64
    keys, queries, values, matrices, vectors, ends = pointers
    to_keys, to_queries, to_values, to_inverses, to_scores, to_vectors, to_ends = (
        buffers
    )
    copy_rows(to_keys.index(slot), keys + first * P.keys, left, 0, P.keys, P.h)
    if WALK != "states":
        rows = queries + first * P.keys
        copy_rows(to_queries.index(slot), rows, left, 0, P.keys, P.h)
    rows = values + first * P.values
    copy_rows(to_values.index(slot), rows, left, first_column, P.values, P.hv)
    matrices += first * P.lines
    if WALK != "back":
        copy_matrix(to_inverses.index(slot), matrices, 0, P)
    if WALK != "states":
        copy_matrix(to_scores.index(slot), matrices, 1, P)
    if WALK == "back":
        copy_rows(to_ends.index(slot), ends + first * P.h, P.h, 0, 64, 64)
    copy_vectors(to_vectors.index(slot), vectors + first * 4)


@gluon_jit
def copy_chunks(
    pointers,
    ready_ptr,
    buffers,
    bars,
    first_column,
    WALK: gl.constexpr,
    P: gl.constexpr,
):
    """What four warps beside a walk do: copy as soon as there is room.

    With `ready_ptr`, also as soon as the chunk's matrices are there (ready_chunks.py).
    """
    for step in range(P.chunks):
        wait_for_room(bars, step)
        chunk = P.chunks - 1 - step if WALK == "back" else step
        if ready_ptr is not None:
            if step % 16 == 0:
                wait_until_ready(ready_ptr, chunk, 16, P.chunks)
        slot = step % P.stages
        copy_chunk(chunk, slot, first_column, pointers, buffers, WALK, P)
        will_come(bars, step)


@gluon_jit
def of_tokens(vectors, slot, WHICH: gl.constexpr):
    """from_start, to_end or beta of a chunk, beside sums of a product."""
    L: gl.constexpr = gl.SliceLayout(0, sums_layout(64))
    return vectors.index(slot).slice(WHICH * 64, 64).load(L)[None, :]


@gluon_jit
def of_chunk(vectors, slot, P: gl.constexpr):
    """from_start at the chunk's end, beside a state."""
    L: gl.constexpr = gl.SliceLayout(0, sums_layout(P.room))
    return vectors.index(slot).slice(63, 1).load(L)[None, :]


@gluon_jit
def left_of(x, COLUMNS: gl.constexpr):
    """A result as left operand of a product: nothing leaves its thread."""
    L: gl.constexpr = gl.DotOperandLayout(0, sums_layout(COLUMNS), 2)
    return gl.convert_layout(x, L)


@gluon_jit
def product(left, right):
    """Starts left right, of 64 columns."""
    nothing = gl.zeros([64, 64], gl.float32, sums_layout(64))
    return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon_jit
def block_of(values, slot, BLOCK: gl.constexpr):
    """A block of value columns of a chunk, turned."""
    block = values.index(slot).slice(64 * BLOCK, 64, 1)
    return block.permute([1, 0]).load(sums_layout(64))


@gluon_jit
def first_block(program, P: gl.constexpr):
    """(the first value column of a program, its head among those of all sequences)."""
    PROGRAMS: gl.constexpr = P.blocks // P.together
    return program % PROGRAMS * (64 * P.together), program // PROGRAMS


@gluon_jit
def state_places(place, first_column, P: gl.constexpr):
    """Where a program's turned state lies in the state, and what is in it."""
    L: gl.constexpr = sums_layout(P.room)
    column = first_column + gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    h = gl.arange(0, P.room, gl.SliceLayout(0, L))[None, :]
    return place * (P.h * P.hv) + h * P.hv + column, (h < P.h) & (column < P.hv)


@gluon_jit
def state_before(initial_ptr, place, first_column, P: gl.constexpr):
    R: gl.constexpr = P.room
    state = gl.zeros([64, R], gl.float32, sums_layout(R))
    if initial_ptr is not None:
        at, inside = state_places(place, first_column, P)
        state = gl.load(initial_ptr + at, inside, 0.0).to(gl.float32)
    return state


@gluon_jit
def store_state(ptr, state, place, first_column, P: gl.constexpr):
    if ptr is not None:
        at, inside = state_places(place, first_column, P)
        gl.store(ptr + at, state.to(ptr.dtype.element_ty), inside)


@gluon_jit
def walk_forward(
    buffers,
    bars,
    initial_ptr,
    place,
    column,
    results,
    BLOCK: gl.constexpr,
    P: gl.constexpr,
):
    """Leaves out and the final state of a block of value columns."""
    out_ptr, final_ptr = results
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    keys, queries, values, inverses, scores, vectors, tiles = buffers
    tile = tiles.index(BLOCK)
    first_column = column + 64 * BLOCK
    state = state_before(initial_ptr, place, first_column, P)
    for chunk in range(P.chunks):
        wait_for_copies(bars, chunk)
        slot = chunk % P.stages
        key = keys.index(slot)
        turned = left_of(state.to(dtype), 64)
        erased = product(turned, key.permute([1, 0]))
        if P.together > 1:
            # two walks have too few registers to keep the operand for later
            read = product(turned, queries.index(slot).permute([1, 0]))
        value = block_of(values, slot, BLOCK)
        from_start = of_tokens(vectors, slot, 0)
        whole = of_chunk(vectors, slot, P)
        beta, to_end = of_tokens(vectors, slot, 2), of_tokens(vectors, slot, 1)
        state = whole * state
        if P.together > 1:
            erased, read, turned = warpgroup_mma_wait(0, deps=[erased, read, turned])
        else:
            erased = warpgroup_mma_wait(0, deps=[erased])
            read = product(turned, queries.index(slot).permute([1, 0]))
        r = beta * (value.to(gl.float32) - from_start * erased)
        r = left_of(r.to(dtype), 64)
        d = product(r, inverses.index(slot).permute([1, 0]))
        within = product(r, scores.index(slot).permute([1, 0]))
        if P.together > 1:
            d = warpgroup_mma_wait(1, deps=[d])
        else:
            # an operand in registers is in use until its product is done
            d, read, turned = warpgroup_mma_wait(1, deps=[d, read, turned])
        stored = left_of((to_end * d).to(dtype), P.room)
        state = warpgroup_mma(stored, key, state, is_async=True)
        within, r = warpgroup_mma_wait(1, deps=[within, r])
        out = P.scale * from_start * read + within
        tile.permute([1, 0]).store(out.to(dtype))
        rows = out_ptr + gl.to_tensor(chunk).to(gl.int64) * (64 * P.values)
        left = tokens_left(chunk, P)
        store_rows(rows, tile, left, first_column, P.values, P.hv)
        state, stored = warpgroup_mma_wait(0, deps=[state, stored])
        all_was_read(bars, chunk)
    store_state(final_ptr, state, place, first_column, P)


@gluon_jit
def walk_states(
    buffers,
    bars,
    initial_ptr,
    place,
    column,
    results,
    BLOCK: gl.constexpr,
    P: gl.constexpr,
):
    """Leaves the states before chunks, and d, of a block of value columns."""
    states_ptr, written_ptr = results
    dtype: gl.constexpr = states_ptr.dtype.element_ty
    keys, values, inverses, vectors, tiles, wides = buffers
    tile, wide = tiles.index(BLOCK), wides.index(BLOCK)
    first_column = column + 64 * BLOCK
    states_ptr += first_column * P.h
    state = state_before(initial_ptr, place, first_column, P)
    for chunk in range(P.chunks):
        wait_for_copies(bars, chunk)
        slot = chunk % P.stages
        first = gl.to_tensor(chunk).to(gl.int64)
        key = keys.index(slot)
        low = state.to(dtype)
        turned = left_of(low, 64)
        erased = product(turned, key.permute([1, 0]))
        value = block_of(values, slot, BLOCK)
        from_start = of_tokens(vectors, slot, 0)
        whole = of_chunk(vectors, slot, P)
        wide.store(low)
        to = states_ptr + first * (P.h * P.hv)
        store_rows(to, wide, P.hv - first_column, 0, P.h, P.h)
        beta, to_end = of_tokens(vectors, slot, 2), of_tokens(vectors, slot, 1)
        state = whole * state
        erased, turned = warpgroup_mma_wait(0, deps=[erased, turned])
        r = beta * (value.to(gl.float32) - from_start * erased)
        r = left_of(r.to(dtype), 64)
        d = product(r, inverses.index(slot).permute([1, 0]))
        d, r = warpgroup_mma_wait(0, deps=[d, r])
        stored = left_of((to_end * d).to(dtype), P.room)
        state = warpgroup_mma(stored, key, state, is_async=True)
        tile.permute([1, 0]).store(d.to(dtype))
        left = tokens_left(chunk, P)
        rows = written_ptr + first * (64 * P.values)
        store_rows(rows, tile, left, first_column, P.values, P.hv)
        state, stored = warpgroup_mma_wait(0, deps=[state, stored])
        all_was_read(bars, chunk)


@gluon_jit
def store_gradients(
    dvalue_ptr, dr_ptr, tile, beta, left, first_column, P: gl.constexpr
):
    """dv = beta dr; of dr what hopper_gradients.py needs beside it."""
    SHAPE: gl.constexpr = tile.shape
    L: gl.constexpr = copies_layout(SHAPE[1], gl.num_warps())
    dr = tile.load(L)
    beta = beta.load(gl.SliceLayout(1, L))[:, None]
    at, inside = places(dvalue_ptr, left, first_column, P.values, P.hv, SHAPE)
    gl.store(at, (beta * dr.to(gl.float32)).to(dr.dtype), inside)
    at, inside = places(dr_ptr, left, first_column, P.values, P.hv, SHAPE)
    gl.store(at, dr, inside & (is_strong(beta) == 0))


@gluon_jit
def walk_backward(
    buffers,
    bars,
    dfinal_ptr,
    place,
    column,
    results,
    BLOCK: gl.constexpr,
    P: gl.constexpr,
):
    """Leaves D after each chunk, dr, and D before the first, of a block of columns.

    With `dvalue_ptr` dv, and dr of tokens alone whose beta is next to nothing.
    """
    dstates_ptr, dr_ptr, dvalue_ptr, dinitial_ptr = results
    dtype: gl.constexpr = dr_ptr.dtype.element_ty
    keys, queries, douts, scores, ends, vectors, tiles, wides = buffers
    tile, wide = tiles.index(BLOCK), wides.index(BLOCK)
    first_column = column + 64 * BLOCK
    dstates_ptr += first_column * P.h
    dstate = state_before(dfinal_ptr, place, first_column, P)
    for step in range(P.chunks):
        wait_for_copies(bars, step)
        slot = step % P.stages
        first = gl.to_tensor(P.chunks - 1 - step).to(gl.int64)
        low = dstate.to(dtype)
        turned = left_of(low, 64)
        dout = block_of(douts, slot, BLOCK)
        dout_left = left_of(dout, 64)
        dr = product(dout_left, scores.index(slot))
        dr = warpgroup_mma(turned, ends.index(slot), dr, is_async=True)
        from_start = of_tokens(vectors, slot, 0)
        whole = of_chunk(vectors, slot, P)
        wide.store(low)
        to_state = dstates_ptr + first * (P.h * P.hv)
        store_rows(to_state, wide, P.hv - first_column, 0, P.h, P.h)
        beta = of_tokens(vectors, slot, 2)
        dstate = whole * dstate
        read = (P.scale * from_start * dout.to(gl.float32)).to(dtype)
        read = left_of(read, P.room)
        dstate = warpgroup_mma(read, queries.index(slot), dstate, is_async=True)
        # operands in registers are in use until their products are done
        dr, dout_left, turned = warpgroup_mma_wait(1, deps=[dr, dout_left, turned])
        erased = left_of((-from_start * beta * dr).to(dtype), P.room)
        dstate = warpgroup_mma(erased, keys.index(slot), dstate, is_async=True)
        tile.permute([1, 0]).store(dr.to(dtype))
        left = tokens_left(P.chunks - 1 - step, P)
        rows = dr_ptr + first * (64 * P.values)
        if dvalue_ptr is None:
            store_rows(rows, tile, left, first_column, P.values, P.hv)
        else:
            to = dvalue_ptr + first * (64 * P.values)
            strengths = vectors.index(slot).slice(2 * 64, 64)
            store_gradients(to, rows, tile, strengths, left, first_column, P)
        dstate, read, erased = warpgroup_mma_wait(0, deps=[dstate, read, erased])
        all_was_read(bars, step)
    store_state(dinitial_ptr, dstate, place, first_column, P)


@gluon_jit
def forward(
    pointers,
    initial_ptr,
    ready_ptr,
    out_ptr,
    final_ptr,
    program,
    P: gl.constexpr,
):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    S: gl.constexpr = P.stages
    R: gl.constexpr = P.room
    B: gl.constexpr = P.together
    column, head = first_block(program, P)
    pointers, place, row = at_head(pointers, head, P)
    if ready_ptr is not None:
        ready_ptr += place * P.chunks
    keys = room_for(dtype, [S, 64, R])
    queries = room_for(dtype, [S, 64, R])
    values = room_for(dtype, [S, 64, 64 * B])
    inverses = room_for(dtype, [S, 64, 64])
    scores = room_for(dtype, [S, 64, 64])
    vectors = room_for_vectors(S)
    tiles = room_for(dtype, [B, 64, 64])
    bars = ring(S, READERS=B)
    filled = (keys, queries, values, inverses, scores, vectors, keys)
    read = (keys, queries, values, inverses, scores, vectors, tiles)
    results = (out_ptr + row, final_ptr)
    if B == 1:
        warp_specialize(
            [
                (walk_forward, (read, bars, initial_ptr, place, column, results, 0, P)),
                (copy_chunks, (pointers, ready_ptr, filled, bars, column, "out", P)),
            ],
            [4],
            [96],
        )
    else:
        warp_specialize(
            [
                (walk_forward, (read, bars, initial_ptr, place, column, results, 0, P)),
                (walk_forward, (read, bars, initial_ptr, place, column, results, 1, P)),
                (copy_chunks, (pointers, ready_ptr, filled, bars, column, "out", P)),
            ],
            [4, 4],
            [232, 40],
        )


@gluon_jit
def forth(pointers, initial_ptr, states_ptr, written_ptr, program, P: gl.constexpr):
    dtype: gl.constexpr = states_ptr.dtype.element_ty
    S: gl.constexpr = P.stages
    R: gl.constexpr = P.room
    B: gl.constexpr = P.together
    column, head = first_block(program, P)
    pointers, place, row = at_head(pointers, head, P)
    states_ptr += place * (P.chunks * P.hv * P.h)
    keys = room_for(dtype, [S, 64, R])
    values = room_for(dtype, [S, 64, 64 * B])
    inverses = room_for(dtype, [S, 64, 64])
    vectors = room_for_vectors(S)
    tiles, wides = room_for(dtype, [B, 64, 64]), room_for(dtype, [B, 64, R])
    bars = ring(S, READERS=B)
    filled = (keys, keys, values, inverses, keys, vectors, keys)
    read = (keys, values, inverses, vectors, tiles, wides)
    results = (states_ptr, written_ptr + row)
    if B == 1:
        warp_specialize(
            [
                (walk_states, (read, bars, initial_ptr, place, column, results, 0, P)),
                (copy_chunks, (pointers, None, filled, bars, column, "states", P)),
            ],
            [4],
            [96],
        )
    else:
        warp_specialize(
            [
                (walk_states, (read, bars, initial_ptr, place, column, results, 0, P)),
                (walk_states, (read, bars, initial_ptr, place, column, results, 1, P)),
                (copy_chunks, (pointers, None, filled, bars, column, "states", P)),
            ],
            [4, 4],
            [232, 40],
        )


@gluon_jit
def back(
    pointers,
    dfinal_ptr,
    dinitial_ptr,
    dstates_ptr,
    dr_ptr,
    dvalue_ptr,
    program,
    P: gl.constexpr,
):
    dtype: gl.constexpr = dr_ptr.dtype.element_ty
    S: gl.constexpr = P.stages
    R: gl.constexpr = P.room
    B: gl.constexpr = P.together
    column, head = first_block(program, P)
    pointers, place, row = at_head(pointers, head, P)
    dstates_ptr += place * (P.chunks * P.hv * P.h)
    keys = room_for(dtype, [S, 64, R])
    queries = room_for(dtype, [S, 64, R])
    douts = room_for(dtype, [S, 64, 64 * B])
    scores = room_for(dtype, [S, 64, 64])
    ends = room_for(dtype, [S, R, 64])
    vectors = room_for_vectors(S)
    tiles, wides = room_for(dtype, [B, 64, 64]), room_for(dtype, [B, 64, R])
    bars = ring(S, READERS=B)
    filled = (keys, queries, douts, keys, scores, vectors, ends)
    read = (keys, queries, douts, scores, ends, vectors, tiles, wides)
    if dvalue_ptr is not None:
        dvalue_ptr += row
    results = (dstates_ptr, dr_ptr + row, dvalue_ptr, dinitial_ptr)
    if B == 1:
        warp_specialize(
            [
                (walk_backward, (read, bars, dfinal_ptr, place, column, results, 0, P)),
                (copy_chunks, (pointers, None, filled, bars, column, "back", P)),
            ],
            [4],
            [96],
        )
    else:
        warp_specialize(
            [
                (walk_backward, (read, bars, dfinal_ptr, place, column, results, 0, P)),
                (walk_backward, (read, bars, dfinal_ptr, place, column, results, 1, P)),
                (copy_chunks, (pointers, None, filled, bars, column, "back", P)),
            ],
            [4, 4],
            [232, 40],
        )


@gluon_jit
def hopper_forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    matrices_ptr,
    vectors_ptr,
    initial_ptr,
    out_ptr,
    final_ptr,
    P: gl.constexpr,
):
    pointers = (key_ptr, query_ptr, value_ptr, matrices_ptr, vectors_ptr, key_ptr)
    forward(pointers, initial_ptr, None, out_ptr, final_ptr, gl.program_id(0), P)


@gluon_jit
def hopper_both_ways_kernel(
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
    dvalue_ptr,
    P: gl.constexpr,
):
    """Neither walk of the backward pass needs the other: they run side by side."""
    program = gl.program_id(0) // 2
    if gl.program_id(0) % 2 == 0:
        behind = (key_ptr, query_ptr, dout_ptr, matrices_ptr, vectors_ptr, ends_ptr)
        results = (dinitial_ptr, dstates_ptr, dr_ptr, dvalue_ptr)
        back(behind, dfinal_ptr, *results, program, P)
    else:
        ahead = (key_ptr, key_ptr, value_ptr, matrices_ptr, vectors_ptr, key_ptr)
        forth(ahead, initial_ptr, states_ptr, written_ptr, program, P)
