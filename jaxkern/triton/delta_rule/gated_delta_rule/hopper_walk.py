"""The walks of walk.py for GPUs of compute capability 9.0, every layout written out.

The formulas and the programs are the same. What Triton leaves undone is done here: a
product runs while what need not wait for it is computed, copies of chunks are STAGES - 1
ahead, and results reach rows of memory through one tile of shared memory.
"""

from jaxkern.gpu.triton_call import (
    async_copy,
    async_load,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.quant.fragments import barrier


@gluon_jit
def place_of_head(
    program, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, T: gl.constexpr
):
    """(row of b and value head, first key row, first value row), in int64."""
    place = program.to(gl.int64)
    b, head = place // NUM_HEADS, place % NUM_HEADS
    num_key_heads: gl.constexpr = NUM_HEADS // GROUP
    key_row = b * T * num_key_heads + head // GROUP
    return place, key_row, b * T * NUM_HEADS + head


@gluon_jit
def copy_rows(
    to,
    ptr,
    rows_left,
    first_column,
    STRIDE: gl.constexpr,
    WIDTH: gl.constexpr,
    ROOM: gl.constexpr,
):
    """Starts the copy of rows of ROOM numbers; zeros beyond the last row or column."""
    ROWS: gl.constexpr = to.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROOM, ROOM // 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, ROOM, gl.SliceLayout(0, L))[None, :]
    inside = row < rows_left
    if WIDTH % ROOM != 0:
        inside = inside & (first_column + column < WIDTH)
    # in 64 bits: neighbouring rows are then one address and constants
    async_load(to, ptr + first_column + (row.to(gl.int64) * STRIDE + column), inside)


@gluon_jit
def store_rows(
    ptr,
    tile,
    rows_left,
    first_column,
    STRIDE: gl.constexpr,
    WIDTH: gl.constexpr,
    ROOM: gl.constexpr,
):
    """Writes a tile of 64 rows of ROOM numbers."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROOM, ROOM // 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, ROOM, gl.SliceLayout(0, L))[None, :]
    inside = row < rows_left
    if WIDTH % ROOM != 0:
        inside = inside & (first_column + column < WIDTH)
    ptr += first_column + (row.to(gl.int64) * STRIDE + column)
    gl.store(ptr, tile.load(L), inside)


@gluon_jit
def copy_chunk(
    chunk,
    slot,
    first_column,
    key_ptr,
    query_ptr,
    value_ptr,
    matrices_ptr,
    vectors_ptr,
    keys,
    queries,
    values,
    inverses,
    scores,
    vectors,
    T: gl.constexpr,
    CHUNKS: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    """Starts the copies of a chunk; of none before the first or after the last."""
    CHUNK: gl.constexpr = 64
    there = (chunk >= 0) & (chunk < CHUNKS)
    left = gl.where(there, T - chunk * CHUNK, 0)
    whole = gl.where(there, CHUNK, 0)
    first = chunk.to(gl.int64) * CHUNK
    copy_rows(keys.index(slot), key_ptr + first * KEYS, left, 0, KEYS, H, BLOCK_H)
    if queries is not None:
        rows = query_ptr + first * KEYS
        copy_rows(queries.index(slot), rows, left, 0, KEYS, H, BLOCK_H)
    rows = value_ptr + first * VALUES
    copy_rows(values.index(slot), rows, left, first_column, VALUES, HV, 64)
    tiles = matrices_ptr + first * (2 * CHUNK)
    if inverses is not None:
        copy_rows(inverses.index(slot), tiles, whole, 0, CHUNK, CHUNK, CHUNK)
    if scores is not None:
        tiles += CHUNK * CHUNK
        copy_rows(scores.index(slot), tiles, whole, 0, CHUNK, CHUNK, CHUNK)
    number = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
    at = vectors_ptr + first * 3 + number
    async_load(vectors.index(slot), at, number < 3 * whole)
    async_copy.commit_group()


@gluon_jit
def copy_ends(to, ends_ptr, chunk, H: gl.constexpr):
    """Starts the copy of `[h, 64]` of a chunk; of zeros before the first."""
    CHUNK: gl.constexpr = 64
    rows = gl.where(chunk >= 0, H, 0)
    from_ptr = ends_ptr + chunk.to(gl.int64) * (H * CHUNK)
    copy_rows(to, from_ptr, rows, 0, CHUNK, CHUNK, CHUNK)


@gluon_jit
def turned_state_at(first_column, H: gl.constexpr, HV: gl.constexpr, L: gl.constexpr):
    """Where the turned state of a program lies in the state, and what is in it."""
    column = first_column + gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    h = gl.arange(0, L.instr_shape[1], gl.SliceLayout(0, L))[None, :]
    return h * HV + column, (h < H) & (column < HV)


@gluon_jit
def walk_forward(
    query_ptr,
    key_ptr,
    value_ptr,
    matrices_ptr,
    vectors_ptr,
    initial_ptr,
    out_ptr,
    final_ptr,
    states_ptr,
    written_ptr,
    program,
    first_column,
    T: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    BLOCK_H: gl.constexpr,
    SCALE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Leaves out and the final state, or the states before chunks and d (`written`)."""
    CHUNK: gl.constexpr = 64
    CHUNKS: gl.constexpr = (T + CHUNK - 1) // CHUNK
    KEYS: gl.constexpr = NUM_HEADS // GROUP * H
    VALUES: gl.constexpr = NUM_HEADS * HV
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    DIMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_OF_DIMS: gl.constexpr = gl.DotOperandLayout(0, DIMS, 2)
    OF_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    OF_DIM: gl.constexpr = gl.SliceLayout(0, DIMS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = key_ptr.dtype.element_ty
    place, key_row, value_row = place_of_head(program, NUM_HEADS, GROUP, T)
    key_ptr += key_row * H
    value_ptr += value_row * HV
    matrices_ptr += place * (CHUNKS * 2 * CHUNK * CHUNK)
    vectors_ptr += place * (CHUNKS * 3 * CHUNK)
    state = gl.zeros([64, BLOCK_H], gl.float32, DIMS)
    if initial_ptr is not None:
        initial_at, there = turned_state_at(first_column, H, HV, DIMS)
        initial = gl.load(initial_ptr + place * (H * HV) + initial_at, there, 0.0)
        state = initial.to(gl.float32)
    keys = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_H], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, 64], SHARED)
    inverses = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], SHARED)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], PLAIN)
    tile = gl.allocate_shared_memory(dtype, [CHUNK, 64], SHARED)
    queries = None
    scores = None
    if out_ptr is not None:
        query_ptr += key_row * H
        out_ptr += value_row * HV
        queries = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_H], SHARED)
        scores = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], SHARED)
    else:
        written_ptr += value_row * HV
        states_ptr += place * (CHUNKS * H * HV)
        wide = gl.allocate_shared_memory(dtype, [64, BLOCK_H], SHARED)
    for copied in gl.static_range(STAGES - 1):
        copy_chunk(
            gl.to_tensor(copied),
            copied,
            first_column,
            key_ptr,
            query_ptr,
            value_ptr,
            matrices_ptr,
            vectors_ptr,
            keys,
            queries,
            values,
            inverses,
            scores,
            vectors,
            T,
            CHUNKS,
            KEYS,
            VALUES,
            H,
            HV,
            BLOCK_H,
        )
    for chunk in range(CHUNKS):
        # all see the chunk that comes next, and no warp still reads the one before
        async_copy.wait_group(STAGES - 2)
        barrier()
        slot = chunk % STAGES
        first = chunk.to(gl.int64) * CHUNK
        left = T - chunk * CHUNK
        key, inverse = keys.index(slot), inverses.index(slot)
        low = state.to(dtype)
        turned = gl.convert_layout(low, LEFT)
        nothing = gl.zeros([64, CHUNK], gl.float32, TOKENS)
        erased = warpgroup_mma(
            turned, key.permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        value = values.index(slot).permute([1, 0]).load(TOKENS)
        of_chunk = vectors.index(slot)
        from_start = of_chunk.slice(0, CHUNK).load(OF_TOKEN)[None, :]
        whole = of_chunk.slice(CHUNK - 1, 1).load(OF_DIM)[None, :]
        ahead = chunk + STAGES - 1
        copy_chunk(
            ahead,
            ahead % STAGES,
            first_column,
            key_ptr,
            query_ptr,
            value_ptr,
            matrices_ptr,
            vectors_ptr,
            keys,
            queries,
            values,
            inverses,
            scores,
            vectors,
            T,
            CHUNKS,
            KEYS,
            VALUES,
            H,
            HV,
            BLOCK_H,
        )
        beta = of_chunk.slice(2 * CHUNK, CHUNK).load(OF_TOKEN)[None, :]
        to_end = of_chunk.slice(CHUNK, CHUNK).load(OF_TOKEN)[None, :]
        state = whole * state
        if out_ptr is None:
            wide.store(low)
            of_state = states_ptr + chunk.to(gl.int64) * (H * HV) + first_column * H
            store_rows(of_state, wide, HV - first_column, 0, H, H, BLOCK_H)
        erased = warpgroup_mma_wait(0, deps=[erased])
        if out_ptr is not None:
            query = queries.index(slot).permute([1, 0])
            read = warpgroup_mma(turned, query, nothing, use_acc=False, is_async=True)
        r = (beta * (value.to(gl.float32) - from_start * erased)).to(dtype)
        r = gl.convert_layout(r, LEFT)
        d = warpgroup_mma(
            r, inverse.permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        if out_ptr is not None:
            score = scores.index(slot).permute([1, 0])
            within = warpgroup_mma(r, score, nothing, use_acc=False, is_async=True)
            # an operand in registers is in use until its product is done
            d, read, turned = warpgroup_mma_wait(1, deps=[d, read, turned])
        else:
            d = warpgroup_mma_wait(0, deps=[d])
        stored = gl.convert_layout((to_end * d).to(dtype), LEFT_OF_DIMS)
        state = warpgroup_mma(stored, key, state, is_async=True)
        if out_ptr is not None:
            within, r = warpgroup_mma_wait(1, deps=[within, r])
            out = SCALE * from_start * read + within
            tile.permute([1, 0]).store(out.to(dtype))
            rows = out_ptr + first * VALUES
        else:
            tile.permute([1, 0]).store(d.to(dtype))
            rows = written_ptr + first * VALUES
        store_rows(rows, tile, left, first_column, VALUES, HV, 64)
        state, stored = warpgroup_mma_wait(0, deps=[state, stored])
    if final_ptr is not None:
        at, inside = turned_state_at(first_column, H, HV, DIMS)
        final = state.to(final_ptr.dtype.element_ty)
        gl.store(final_ptr + place * (H * HV) + at, final, inside)


@gluon_jit
def walk_backward(
    query_ptr,
    key_ptr,
    matrices_ptr,
    vectors_ptr,
    ends_ptr,
    dout_ptr,
    dfinal_ptr,
    dinitial_ptr,
    dstates_ptr,
    dr_ptr,
    program,
    first_column,
    T: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    BLOCK_H: gl.constexpr,
    SCALE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Leaves D after each chunk, dr, and D before the first."""
    CHUNK: gl.constexpr = 64
    CHUNKS: gl.constexpr = (T + CHUNK - 1) // CHUNK
    KEYS: gl.constexpr = NUM_HEADS // GROUP * H
    VALUES: gl.constexpr = NUM_HEADS * HV
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    DIMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_OF_DIMS: gl.constexpr = gl.DotOperandLayout(0, DIMS, 2)
    OF_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    OF_DIM: gl.constexpr = gl.SliceLayout(0, DIMS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = key_ptr.dtype.element_ty
    place, key_row, value_row = place_of_head(program, NUM_HEADS, GROUP, T)
    query_ptr += key_row * H
    key_ptr += key_row * H
    dout_ptr += value_row * HV
    dr_ptr += value_row * HV
    matrices_ptr += place * (CHUNKS * 2 * CHUNK * CHUNK)
    vectors_ptr += place * (CHUNKS * 3 * CHUNK)
    ends_ptr += place * (CHUNKS * CHUNK * H)
    dstates_ptr += place * (CHUNKS * H * HV)
    at, inside = turned_state_at(first_column, H, HV, DIMS)
    at += place * (H * HV)
    dstate = gl.load(dfinal_ptr + at, inside, 0.0).to(gl.float32)
    keys = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_H], SHARED)
    queries = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_H], SHARED)
    douts = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, 64], SHARED)
    ends = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_H, CHUNK], SHARED)
    scores = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], SHARED)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], PLAIN)
    tile = gl.allocate_shared_memory(dtype, [CHUNK, 64], SHARED)
    wide = gl.allocate_shared_memory(dtype, [64, BLOCK_H], SHARED)
    for copied in gl.static_range(STAGES - 1):
        copy_ends(ends.index(copied), ends_ptr, gl.to_tensor(CHUNKS - 1 - copied), H)
        copy_chunk(
            gl.to_tensor(CHUNKS - 1 - copied),
            copied,
            first_column,
            key_ptr,
            query_ptr,
            dout_ptr,
            matrices_ptr,
            vectors_ptr,
            keys,
            queries,
            douts,
            None,
            scores,
            vectors,
            T,
            CHUNKS,
            KEYS,
            VALUES,
            H,
            HV,
            BLOCK_H,
        )
    for step in range(CHUNKS):
        async_copy.wait_group(STAGES - 2)
        barrier()
        slot = step % STAGES
        chunk = CHUNKS - 1 - step
        first = chunk.to(gl.int64) * CHUNK
        left = T - chunk * CHUNK
        key = keys.index(slot)
        low = dstate.to(dtype)
        turned = gl.convert_layout(low, LEFT)
        dout = douts.index(slot).permute([1, 0]).load(TOKENS)
        dout_left = gl.convert_layout(dout, LEFT)
        nothing = gl.zeros([64, CHUNK], gl.float32, TOKENS)
        score = scores.index(slot)
        dr = warpgroup_mma(dout_left, score, nothing, use_acc=False, is_async=True)
        dr = warpgroup_mma(turned, ends.index(slot), dr, is_async=True)
        of_chunk = vectors.index(slot)
        from_start = of_chunk.slice(0, CHUNK).load(OF_TOKEN)[None, :]
        whole = of_chunk.slice(CHUNK - 1, 1).load(OF_DIM)[None, :]
        ahead = step + STAGES - 1
        copy_ends(ends.index(ahead % STAGES), ends_ptr, CHUNKS - 1 - ahead, H)
        copy_chunk(
            CHUNKS - 1 - ahead,
            ahead % STAGES,
            first_column,
            key_ptr,
            query_ptr,
            dout_ptr,
            matrices_ptr,
            vectors_ptr,
            keys,
            queries,
            douts,
            None,
            scores,
            vectors,
            T,
            CHUNKS,
            KEYS,
            VALUES,
            H,
            HV,
            BLOCK_H,
        )
        wide.store(low)
        rows = dstates_ptr + chunk.to(gl.int64) * (H * HV) + first_column * H
        store_rows(rows, wide, HV - first_column, 0, H, H, BLOCK_H)
        beta = of_chunk.slice(2 * CHUNK, CHUNK).load(OF_TOKEN)[None, :]
        dstate = whole * dstate
        read = (SCALE * from_start * dout.to(gl.float32)).to(dtype)
        read = gl.convert_layout(read, LEFT_OF_DIMS)
        dstate = warpgroup_mma(read, queries.index(slot), dstate, is_async=True)
        # operands in registers are in use until their products are done
        dr, dout_left, turned = warpgroup_mma_wait(1, deps=[dr, dout_left, turned])
        erased = (-from_start * beta * dr).to(dtype)
        erased = gl.convert_layout(erased, LEFT_OF_DIMS)
        dstate = warpgroup_mma(erased, key, dstate, is_async=True)
        tile.permute([1, 0]).store(dr.to(dtype))
        rows = dr_ptr + first * VALUES
        store_rows(rows, tile, left, first_column, VALUES, HV, 64)
        dstate, read, erased = warpgroup_mma_wait(0, deps=[dstate, read, erased])
    if dinitial_ptr is not None:
        initial = dstate.to(dinitial_ptr.dtype.element_ty)
        gl.store(dinitial_ptr + at, initial, inside)


@gluon_jit
def forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    matrices_ptr,
    vectors_ptr,
    initial_ptr,
    out_ptr,
    final_ptr,
    T: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    BLOCK_H: gl.constexpr,
    SCALE: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCKS: gl.constexpr = (HV + 63) // 64
    walk_forward(
        query_ptr,
        key_ptr,
        value_ptr,
        matrices_ptr,
        vectors_ptr,
        initial_ptr,
        out_ptr,
        final_ptr,
        None,
        None,
        gl.program_id(0) // BLOCKS,
        gl.program_id(0) % BLOCKS * 64,
        T,
        NUM_HEADS,
        GROUP,
        H,
        HV,
        BLOCK_H,
        SCALE,
        STAGES,
    )


@gluon_jit
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
    T: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    BLOCK_H: gl.constexpr,
    SCALE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Neither walk of the backward pass needs the other: they run side by side."""
    BLOCKS: gl.constexpr = (HV + 63) // 64
    program = gl.program_id(0) // 2
    if gl.program_id(0) % 2 == 0:
        walk_backward(
            query_ptr,
            key_ptr,
            matrices_ptr,
            vectors_ptr,
            ends_ptr,
            dout_ptr,
            dfinal_ptr,
            dinitial_ptr,
            dstates_ptr,
            dr_ptr,
            program // BLOCKS,
            program % BLOCKS * 64,
            T,
            NUM_HEADS,
            GROUP,
            H,
            HV,
            BLOCK_H,
            SCALE,
            STAGES,
        )
    else:
        walk_forward(
            query_ptr,
            key_ptr,
            value_ptr,
            matrices_ptr,
            vectors_ptr,
            initial_ptr,
            None,
            None,
            states_ptr,
            written_ptr,
            program // BLOCKS,
            program % BLOCKS * 64,
            T,
            NUM_HEADS,
            GROUP,
            H,
            HV,
            BLOCK_H,
            SCALE,
            STAGES,
        )
