"""The walks of walk.py for GPUs of compute capability 9.0, every layout written out.

The formulas and the programs are the same. What Triton leaves undone is done here: a
product runs while what need not wait for it is computed, chunks are copied `stages` - 1
ahead, and results reach rows of memory through one tile of shared memory. As where
Triton copies, no fence of proxies stands between copies and products: one a chunk would
wait for the copies of all later chunks too.

Tuples go with a walk: `pointers` to keys, queries, values (or dout), matrices, vectors
and ends, and `buffers` of shared memory for `stages` chunks of them, T and P T apart.
What a WALK ("out", "states" or "back") has none of is the keys' again.
"""

import dataclasses

from jaxkern.gpu.triton_call import (
    async_copy,
    async_load,
    constexpr_function,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.quant.fragments import barrier

COLUMNS = 64  # value columns of a program, and tokens of a chunk


@dataclasses.dataclass(frozen=True)
class Walk:
    """Shapes, and how many chunks are in shared memory."""

    tokens: int
    heads: int
    group: int
    h: int
    hv: int
    room: int  # for h
    scale: float
    stages: int

    @property
    def chunks(self) -> int:
        return -(-self.tokens // 64)

    @property
    def blocks(self) -> int:
        return -(-self.hv // COLUMNS)

    @property
    def keys(self) -> int:
        """From a token's row of keys to the next token's."""
        return self.heads // self.group * self.h

    @property
    def values(self) -> int:
        return self.heads * self.hv


@constexpr_function
def sums_layout(columns):
    """Of a product `[64, columns]` of the four warps together."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def copies_layout(room):
    """Of rows that are copied, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // room, room // 8], [4, 1], [1, 0])


@gluon_jit
def places(
    rows_left,
    first_column,
    STRIDE: gl.constexpr,
    WIDTH: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Where rows of some columns lie, and which are in the array.

    In 64 bits: neighbouring rows are then one address and constants.
    """
    L: gl.constexpr = copies_layout(SHAPE[1])
    row = gl.arange(0, SHAPE[0], gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, SHAPE[1], gl.SliceLayout(0, L))[None, :]
    inside = row < rows_left
    if WIDTH % SHAPE[1] != 0:
        inside = inside & (first_column + column < WIDTH)
    return first_column + (row.to(gl.int64) * STRIDE + column), inside


@gluon_jit
def copy_rows(
    to, ptr, rows_left, first_column, STRIDE: gl.constexpr, WIDTH: gl.constexpr
):
    """Starts a copy to shared memory; zeros beyond the last row or column."""
    SHAPE: gl.constexpr = to.shape
    at, inside = places(rows_left, first_column, STRIDE, WIDTH, SHAPE)
    async_load(to, ptr + at, inside)


@gluon_jit
def store_rows(
    ptr, tile, rows_left, first_column, STRIDE: gl.constexpr, WIDTH: gl.constexpr
):
    SHAPE: gl.constexpr = tile.shape
    at, inside = places(rows_left, first_column, STRIDE, WIDTH, SHAPE)
    gl.store(ptr + at, tile.load(copies_layout(SHAPE[1])), inside)


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
    matrices += place * (P.chunks * 2 * 64 * 64)
    vectors += place * (P.chunks * 3 * 64)
    ends += place * (P.chunks * P.h * 64)
    return (keys, queries, values, matrices, vectors, ends), place, value_row


@gluon_jit
def copy_chunk(
    chunk, slot, first_column, pointers, buffers, WALK: gl.constexpr, P: gl.constexpr
):
    """Starts the copies of a chunk; of zeros before the first or after the last."""
    there = (chunk >= 0) & (chunk < P.chunks)
    left = gl.where(there, P.tokens - chunk * 64, 0)
    whole = gl.where(there, 64, 0)
    first = chunk.to(gl.int64) * 64
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
    matrices += first * (2 * 64)
    if WALK != "back":
        copy_rows(to_inverses.index(slot), matrices, whole, 0, 64, 64)
    if WALK != "states":
        copy_rows(to_scores.index(slot), matrices + 64 * 64, whole, 0, 64, 64)
    if WALK == "back":
        rows = gl.where(there, P.h, 0)
        copy_rows(to_ends.index(slot), ends + first * P.h, rows, 0, 64, 64)
    number = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
    at = vectors + first * 3 + number
    async_load(to_vectors.index(slot), at, number < 3 * whole)
    async_copy.commit_group()


@gluon_jit
def room_for(dtype: gl.constexpr, SHAPE: gl.constexpr):
    """Shared memory as matrix units read it."""
    return gl.allocate_shared_memory(dtype, SHAPE, gl.NVMMASharedLayout(128, 16, 2))


@gluon_jit
def room_for_vectors(P: gl.constexpr):
    S: gl.constexpr = P.stages
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [S, 256], PLAIN)


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
def walk_forward(pointers, initial_ptr, out_ptr, final_ptr, P: gl.constexpr):
    """Leaves out and the final state."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    S: gl.constexpr = P.stages
    R: gl.constexpr = P.room
    first_column = gl.program_id(0) % P.blocks * 64
    pointers, place, row = at_head(pointers, gl.program_id(0) // P.blocks, P)
    state = state_before(initial_ptr, place, first_column, P)
    keys = room_for(dtype, [S, 64, R])
    queries = room_for(dtype, [S, 64, R])
    values = room_for(dtype, [S, 64, 64])
    inverses = room_for(dtype, [S, 64, 64])
    scores = room_for(dtype, [S, 64, 64])
    vectors = room_for_vectors(P)
    tile = room_for(dtype, [64, 64])
    buffers = (keys, queries, values, inverses, scores, vectors, keys)
    for k in gl.static_range(S - 1):
        copy_chunk(gl.to_tensor(k), k, first_column, pointers, buffers, "out", P)
    for chunk in range(P.chunks):
        # all see the chunk that comes next, and no warp still reads the one before
        async_copy.wait_group(S - 2)
        barrier()
        slot = chunk % S
        key = keys.index(slot)
        turned = left_of(state.to(dtype), 64)
        erased = product(turned, key.permute([1, 0]))
        value = values.index(slot).permute([1, 0]).load(sums_layout(64))
        from_start = of_tokens(vectors, slot, 0)
        whole = of_chunk(vectors, slot, P)
        ahead = chunk + S - 1
        copy_chunk(ahead, ahead % S, first_column, pointers, buffers, "out", P)
        beta, to_end = of_tokens(vectors, slot, 2), of_tokens(vectors, slot, 1)
        state = whole * state
        erased = warpgroup_mma_wait(0, deps=[erased])
        read = product(turned, queries.index(slot).permute([1, 0]))
        r = beta * (value.to(gl.float32) - from_start * erased)
        r = left_of(r.to(dtype), 64)
        d = product(r, inverses.index(slot).permute([1, 0]))
        within = product(r, scores.index(slot).permute([1, 0]))
        # an operand in registers is in use until its product is done
        d, read, turned = warpgroup_mma_wait(1, deps=[d, read, turned])
        stored = left_of((to_end * d).to(dtype), P.room)
        state = warpgroup_mma(stored, key, state, is_async=True)
        within, r = warpgroup_mma_wait(1, deps=[within, r])
        out = P.scale * from_start * read + within
        tile.permute([1, 0]).store(out.to(dtype))
        first = gl.to_tensor(chunk).to(gl.int64)
        rows = out_ptr + row + first * (64 * P.values)
        left = P.tokens - chunk * 64
        store_rows(rows, tile, left, first_column, P.values, P.hv)
        state, stored = warpgroup_mma_wait(0, deps=[state, stored])
    store_state(final_ptr, state, place, first_column, P)


@gluon_jit
def walk_states(
    pointers, initial_ptr, states_ptr, written_ptr, program, P: gl.constexpr
):
    """Leaves the states before chunks, and d."""
    dtype: gl.constexpr = states_ptr.dtype.element_ty
    S: gl.constexpr = P.stages
    R: gl.constexpr = P.room
    first_column = program % P.blocks * 64
    pointers, place, row = at_head(pointers, program // P.blocks, P)
    state = state_before(initial_ptr, place, first_column, P)
    states_ptr += (place * (P.chunks * P.hv) + first_column) * P.h
    keys = room_for(dtype, [S, 64, R])
    values = room_for(dtype, [S, 64, 64])
    inverses = room_for(dtype, [S, 64, 64])
    vectors = room_for_vectors(P)
    tile = room_for(dtype, [64, 64])
    wide = room_for(dtype, [64, R])
    buffers = (keys, keys, values, inverses, keys, vectors, keys)
    for k in gl.static_range(S - 1):
        copy_chunk(gl.to_tensor(k), k, first_column, pointers, buffers, "states", P)
    for chunk in range(P.chunks):
        async_copy.wait_group(S - 2)
        barrier()
        slot = chunk % S
        first = gl.to_tensor(chunk).to(gl.int64)
        key = keys.index(slot)
        low = state.to(dtype)
        turned = left_of(low, 64)
        erased = product(turned, key.permute([1, 0]))
        value = values.index(slot).permute([1, 0]).load(sums_layout(64))
        from_start = of_tokens(vectors, slot, 0)
        whole = of_chunk(vectors, slot, P)
        ahead = chunk + S - 1
        copy_chunk(ahead, ahead % S, first_column, pointers, buffers, "states", P)
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
        rows = written_ptr + row + first * (64 * P.values)
        left = P.tokens - chunk * 64
        store_rows(rows, tile, left, first_column, P.values, P.hv)
        state, stored = warpgroup_mma_wait(0, deps=[state, stored])


@gluon_jit
def walk_backward(
    pointers, dfinal_ptr, dinitial_ptr, dstates_ptr, dr_ptr, program, P: gl.constexpr
):
    """Leaves D after each chunk, dr, and D before the first."""
    dtype: gl.constexpr = dr_ptr.dtype.element_ty
    S: gl.constexpr = P.stages
    R: gl.constexpr = P.room
    first_column = program % P.blocks * 64
    pointers, place, row = at_head(pointers, program // P.blocks, P)
    dstate = state_before(dfinal_ptr, place, first_column, P)
    dstates_ptr += (place * (P.chunks * P.hv) + first_column) * P.h
    keys = room_for(dtype, [S, 64, R])
    queries = room_for(dtype, [S, 64, R])
    douts = room_for(dtype, [S, 64, 64])
    scores = room_for(dtype, [S, 64, 64])
    ends = room_for(dtype, [S, R, 64])
    vectors = room_for_vectors(P)
    tile = room_for(dtype, [64, 64])
    wide = room_for(dtype, [64, R])
    buffers = (keys, queries, douts, keys, scores, vectors, ends)
    for k in gl.static_range(S - 1):
        chunk = gl.to_tensor(P.chunks - 1 - k)
        copy_chunk(chunk, k, first_column, pointers, buffers, "back", P)
    for step in range(P.chunks):
        async_copy.wait_group(S - 2)
        barrier()
        slot = step % S
        first = (P.chunks - 1 - step).to(gl.int64)
        low = dstate.to(dtype)
        turned = left_of(low, 64)
        dout = douts.index(slot).permute([1, 0]).load(sums_layout(64))
        dout_left = left_of(dout, 64)
        dr = product(dout_left, scores.index(slot))
        dr = warpgroup_mma(turned, ends.index(slot), dr, is_async=True)
        from_start = of_tokens(vectors, slot, 0)
        whole = of_chunk(vectors, slot, P)
        ahead = step + S - 1
        to = P.chunks - 1 - ahead
        copy_chunk(to, ahead % S, first_column, pointers, buffers, "back", P)
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
        rows = dr_ptr + row + first * (64 * P.values)
        left = P.tokens - (P.chunks - 1 - step) * 64
        store_rows(rows, tile, left, first_column, P.values, P.hv)
        dstate, read, erased = warpgroup_mma_wait(0, deps=[dstate, read, erased])
    store_state(dinitial_ptr, dstate, place, first_column, P)


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
    walk_forward(pointers, initial_ptr, out_ptr, final_ptr, P)


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
    P: gl.constexpr,
):
    """Neither walk of the backward pass needs the other: they run side by side."""
    program = gl.program_id(0) // 2
    if gl.program_id(0) % 2 == 0:
        back = (key_ptr, query_ptr, dout_ptr, matrices_ptr, vectors_ptr, ends_ptr)
        walk_backward(back, dfinal_ptr, dinitial_ptr, dstates_ptr, dr_ptr, program, P)
    else:
        forth = (key_ptr, key_ptr, value_ptr, matrices_ptr, vectors_ptr, key_ptr)
        walk_states(forth, initial_ptr, states_ptr, written_ptr, program, P)
