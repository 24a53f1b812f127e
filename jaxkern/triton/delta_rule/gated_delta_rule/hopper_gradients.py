"""The gradients of gradients.py in one kernel, for GPUs of compute capability 9.0.

The formulas are the same. Here all that a chunk of a value head needs comes to shared
memory once, and what pairs of its tokens give never leaves the multiprocessor. W^T and
dqk^T are tiles of shared memory that the matrix units read turned.

A program has a multiprocessor to itself and goes over chunks of key heads, of each over
the value heads that share it: a step. Three groups of warps meet at bars alone:

    gradients    eight warps multiply matrices; half of them has half of the columns
                 of every product
    gates        two warps make what needs no product: <S, D>, dg, dbeta, and the rows
                 of dq and dk in memory
    copy_steps   two warps copy, in the order in which there is room

Rows of values, d and decays of two steps are in shared memory, S and D of one, and
queries and keys of one key head. The walk back leaves dv = beta dr, which takes the
place of dr in all products, since W and erased want it so. Tokens whose beta has too
few digits for dr . d / beta need dr itself (`gradient_of_weak`).
"""

from jaxkern.gpu.triton_call import (
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    mma_v2,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.delta_rule.gated_delta_rule.hopper_tiles import (
    all_was_left,
    all_was_read,
    copies_layout,
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
    was_read,
    will_come,
)
from jaxkern.triton.quant.fragments import barrier

LARGEST = 128  # dims of a head
BESIDE = 2  # warps that copy, and as many for the gates
REGISTERS = 56  # of a thread of either


@constexpr_function
def sums_layout(columns):
    """Of a product `[64, columns]`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


@constexpr_function
def rows_layout(columns):
    """Of a number of each token, beside such a product."""
    return gl.SliceLayout(1, sums_layout(columns))


@constexpr_function
def line_layout(size, warps):
    """Of numbers in a line: each warp has all of them."""
    return gl.BlockedLayout([size // 32], [32], [warps], [0])


@constexpr_function
def halves_layout(warps):
    """Of two such lines of 64."""
    return gl.BlockedLayout([2, 2], [1, 32], [warps, 1], [1, 0])


@gluon_jit
def product(left, right, COLUMNS: gl.constexpr):
    """Starts left right."""
    nothing = gl.zeros([64, COLUMNS], gl.float32, sums_layout(COLUMNS))
    return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon_jit
def added(sums, left, right):
    """Starts sums + left right."""
    return warpgroup_mma(left, right, sums, is_async=True)


@gluon_jit
def beside(x, COLUMNS: gl.constexpr):
    """A number of each token for the rows of a product: nothing leaves its thread."""
    return gl.convert_layout(x, rows_layout(COLUMNS))[:, None]


@gluon_jit
def of_step(step, P: gl.constexpr):
    """(tokens left from a step's chunk on, where its rows of keys and of values begin,
    where its chunk is among all)."""
    place = gl.program_id(0) + step // P.group * gl.num_programs(0)
    head = place % P.key_heads * P.group + step % P.group
    chunk = place // P.key_heads % P.chunks
    b = (place // (P.key_heads * P.chunks)).to(gl.int64)
    token = b * P.tokens + chunk * 64
    keys = (token * P.key_heads + place % P.key_heads) * P.h
    at_chunk = (b * P.heads + head) * P.chunks + chunk
    return tokens_left(chunk, P), keys, token * P.heads + head, at_chunk


@gluon_jit
def copy_states(states, ptr, at_chunk, P: gl.constexpr):
    copy_rows(states, ptr + at_chunk * (P.h * P.hv), P.hv, 0, P.h, P.h)


@gluon_jit
def copy_tokens(pointers, buffers, rings, step, P: gl.constexpr):
    """Of a step what has two places."""
    _query_ptr, _key_ptr, written_ptr, vectors_ptr, dout_ptr = pointers[:5]
    dvalue_ptr, _states_ptr, _dstates_ptr = pointers[5:]
    _queries, _keys, ds, vectors, douts, dvs, _states, _dstates = buffers
    _shared, kept, _before, _behind, _summed = rings
    left, _at_keys, at_tokens, at_chunk = of_step(step, P)
    at_values = at_tokens * P.hv
    slot = step % 2
    wait_for_room(kept, step)
    rows = written_ptr + at_values
    copy_rows(ds.index(slot), rows, left, 0, P.values, P.hv)
    copy_rows(douts.index(slot), dout_ptr + at_values, left, 0, P.values, P.hv)
    copy_rows(dvs.index(slot), dvalue_ptr + at_values, left, 0, P.values, P.hv)
    copy_vectors(vectors.index(slot), vectors_ptr + at_chunk * (4 * 64))
    will_come(kept, step)


@gluon_jit
def copy_steps(pointers, buffers, rings, steps, P: gl.constexpr):
    """What the warps do that copy, in the order in which there is room."""
    query_ptr, key_ptr, _written_ptr, _vectors_ptr, _dout_ptr = pointers[:5]
    _dvalue_ptr, states_ptr, dstates_ptr = pointers[5:]
    queries, keys, _ds, _vectors, _douts, _dvs, states, dstates = buffers
    shared, _kept, before, behind, _summed = rings
    copy_tokens(pointers, buffers, rings, 0, P)
    for step in range(steps):
        left, at_keys, _at_tokens, at_chunk = of_step(step, P)
        wait_for_room(before, step)
        copy_states(states, states_ptr, at_chunk, P)
        will_come(before, step)
        wait_for_room(behind, step)
        copy_states(dstates, dstates_ptr, at_chunk, P)
        will_come(behind, step)
        if step + 1 < steps:
            copy_tokens(pointers, buffers, rings, step + 1, P)
        if step % P.group == 0:
            turn = step // P.group
            wait_for_room(shared, turn)
            copy_rows(queries, query_ptr + at_keys, left, 0, P.keys, P.h)
            copy_rows(keys, key_ptr + at_keys, left, 0, P.keys, P.h)
            will_come(shared, turn)


@gluon_jit
def one_sum(x, y):
    return x + y


@gluon_jit
def decayed_pairs(decays):
    """(exp of the sums of g between two tokens, 1 above the diagonal; row; column)."""
    L: gl.constexpr = sums_layout(64)
    row = gl.arange(0, 64, rows_layout(64))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    total = decays.slice(3 * 64, 64)
    later = total.load(rows_layout(64))[:, None]
    earlier = total.load(gl.SliceLayout(0, L))[None, :]
    return gl.exp(gl.where(row >= column, later - earlier, 0.0)), row, column


@gluon_jit
def of_pairs(dqk, dkk, decays, P: gl.constexpr):
    """(dqk, W, dv . d on the diagonal)."""
    between, row, column = decayed_pairs(decays)
    dqk = gl.where(row >= column, P.scale * between * dqk, 0.0)
    weighted = gl.where(row > column, -between * dkk, 0.0)
    return dqk, weighted, gl.where(row == column, dkk, 0.0)


@gluon_jit
def weak_tokens(decays):
    """How many tokens have a d of too few digits."""
    each = decays.slice(2 * 64, 64).load(line_layout(64, gl.num_warps()))
    return gl.sum(gl.where(is_strong(each), 0, 1), 0)


@gluon_jit
def rows_of_weak(tiles, dr_ptr, value_ptr, left, P: gl.constexpr):
    """Brings dr to shared memory, whose rows are there for weak tokens alone.

    Returns dr . v of each token.
    """
    SHAPE: gl.constexpr = tiles[0].shape
    L: gl.constexpr = copies_layout(SHAPE[1], gl.num_warps())
    BLOCKS: gl.constexpr = P.value_blocks
    on_value = gl.zeros([64], gl.float32, gl.SliceLayout(1, L))
    for i in gl.static_range(BLOCKS):
        at, inside = places(dr_ptr, left, 64 * i, P.values, P.hv, SHAPE)
        dr = gl.load(at, inside, 0.0)
        tiles[i].store(dr)
        at, inside = places(value_ptr, left, 64 * i, P.values, P.hv, SHAPE)
        value = gl.load(at, inside, 0.0).to(gl.float32)
        on_value += gl.sum(dr.to(gl.float32) * value, 1)
    fence_async_shared()
    barrier()
    return gl.convert_layout(on_value, rows_layout(64))


@gluon_jit
def gradient_of_weak(k, d, tiles, states, decays, weak_pointers, step, P: gl.constexpr):
    """Leaves dbeta of such tokens."""
    value_ptr, dr_ptr, dbeta_ptr = weak_pointers
    R: gl.constexpr = P.room
    left, _at_keys, at_tokens, _at_chunk = of_step(step, P)
    at_values = at_tokens * P.hv
    dbeta = rows_of_weak(tiles, dr_ptr + at_values, value_ptr + at_values, left, P)
    kk = product(k, k.permute([1, 0]), 64)
    dkk = product(tiles[0], d.slice(0, 64, 1).permute([1, 0]), 64)
    erased = product(tiles[0], states.slice(0, 64), R)
    if P.value_blocks > 1:
        dkk = added(dkk, tiles[1], d.slice(64, 64, 1).permute([1, 0]))
        erased = added(erased, tiles[1], states.slice(64, 64))
    dkk, kk, erased = warpgroup_mma_wait(0, deps=[dkk, kk, erased])
    between, row, column = decayed_pairs(decays)
    dbeta += gl.sum(gl.where(row > column, -between * dkk * kk, 0.0), 1)
    from_start = decays.slice(0, 64).load(rows_layout(R))[:, None]
    erased *= from_start * k.load(sums_layout(R)).to(gl.float32)
    dbeta -= gl.convert_layout(gl.sum(erased, 1), rows_layout(64))
    token = gl.arange(0, 64, rows_layout(64))
    weak = is_strong(decays.slice(2 * 64, 64).load(rows_layout(64))) == 0
    gl.store(dbeta_ptr + at_tokens + token * P.heads, dbeta, weak & (token < left))
    # all have read the tiles
    barrier()


@constexpr_function
def met_layout(warps):
    """Of a product of as many rows as columns, eight columns a warp."""
    return gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8])


@gluon_jit
def across(states, dstates):
    """<S, D>, the diagonal of S D^T."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 8 * WARPS
    L: gl.constexpr = met_layout(WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    sums = gl.zeros([ROWS, ROWS], gl.float32, L)
    for i in gl.static_range(states.shape[0] // ROWS):
        before = states.slice(ROWS * i, ROWS).load(LEFT)
        behind = dstates.slice(ROWS * i, ROWS).permute([1, 0]).load(RIGHT)
        sums = mma_v2(before, behind, sums)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, ROWS, gl.SliceLayout(0, L))[None, :]
    return gl.sum(gl.sum(gl.where(row == column, sums, 0.0), 1), 0)


@gluon_jit
def row_sums(to, x):
    """Leaves the sums of rows in two parts, those of the two halves of the warps."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    to.permute([1, 0]).store(gl.sum(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), 2))


@gluon_jit
def both_halves(sums):
    """What `row_sums` left, added: each warp has all rows."""
    L: gl.constexpr = line_layout(64, gl.num_warps())
    x = gl.sum(sums.load(halves_layout(gl.num_warps())), 0)
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon_jit
def gradients_of_gates(
    dg_ptr, dbeta_ptr, of_tokens, stored, written, across, beta, left, P: gl.constexpr
):
    """Leaves dg: what decays with token l, and all that goes on beyond the chunk.

    Of strong tokens dbeta too, dr . d / beta with dv = beta dr.
    """
    beyond = gl.sum(both_halves(stored), 0) + across
    dg = gl.associative_scan(both_halves(of_tokens), 0, one_sum, reverse=True) + beyond
    token = gl.arange(0, 64, line_layout(64, gl.num_warps()))
    gl.store(dg_ptr + token * P.heads, dg, token < left)
    strong = is_strong(beta)
    dbeta = both_halves(written) / gl.where(strong, beta * beta, 1.0)
    gl.store(dbeta_ptr + token * P.heads, dbeta, strong & (token < left))


@gluon_jit
def gates(results, buffers, sums, rings, steps, P: gl.constexpr):
    """What the warps do that neither copy nor multiply matrices."""
    dquery_ptr, dkey_ptr, dg_ptr, dbeta_ptr = results
    queries, keys, _ds, vectors, _douts, _dvs, states, dstates = buffers
    shared, kept, before, behind, summed = rings
    WARPS: gl.constexpr = gl.num_warps()
    for step in range(steps):
        left, at_keys, at_tokens, _at_chunk = of_step(step, P)
        wait_for_copies(kept, step)
        decays = vectors.index(step % 2)
        beta = decays.slice(2 * 64, 64).load(line_layout(64, WARPS))
        whole = gl.sum(decays.slice(63, 1).load(line_layout(32, WARPS)), 0)
        wait_for_copies(before, step)
        wait_for_copies(behind, step)
        decayed = whole * across(states, dstates)
        all_was_read(before, step)
        was_read(behind, step)
        was_read(kept, step)
        wait_for_copies(summed, step)
        slot = step % 2 * 3
        gradients_of_gates(
            dg_ptr + at_tokens,
            dbeta_ptr + at_tokens,
            sums.index(slot),
            sums.index(slot + 1),
            sums.index(slot + 2),
            decayed,
            beta,
            left,
            P,
        )
        all_was_read(summed, step)
        if step % P.group == P.group - 1:
            store_rows(dquery_ptr + at_keys, queries, left, 0, P.keys, P.h)
            store_rows(dkey_ptr + at_keys, keys, left, 0, P.keys, P.h)
            all_was_read(shared, step // P.group)


@gluon_jit
def gradients(weak_pointers, buffers, tiles, sums, rings, steps, P: gl.constexpr):
    """What the warps do that multiply matrices."""
    q, k, ds, vectors, douts, dvs, states, dstates = buffers
    dqk_tile, w_tile = tiles
    shared, kept, before, behind, summed = rings
    dtype: gl.constexpr = dqk_tile.dtype
    R: gl.constexpr = P.room
    L: gl.constexpr = rows_layout(R)
    dquery = gl.zeros([64, R], gl.float32, sums_layout(R))
    dkey = gl.zeros([64, R], gl.float32, sums_layout(R))
    wait_for_copies(kept, 0)
    weak = weak_tokens(vectors.index(0))
    for step in range(steps):
        turn = step // P.group
        slot = step % 2
        d, dout, dv = ds.index(slot), douts.index(slot), dvs.index(slot)
        decays = vectors.index(slot)
        wait_for_copies(before, step)
        if weak > 0:
            wait_for_copies(shared, turn)
            gradient_of_weak(k, d, tiles, states, decays, weak_pointers, step, P)
        dqk = product(dout, d.permute([1, 0]), 64)
        dkk = product(dv, d.permute([1, 0]), 64)
        read = product(dout, states, R)
        erased = product(dv, states, R)
        # the next step's; of the last step its own
        after = gl.minimum(step + 1, steps - 1)
        wait_for_copies(kept, after)
        weak = weak_tokens(vectors.index(after % 2))
        wait_for_room(summed, step)
        dqk, dkk = warpgroup_mma_wait(2, deps=[dqk, dkk])
        dqk, weighted, written = of_pairs(dqk, dkk, decays, P)
        dqk_tile.store(dqk.to(dtype))
        w_tile.store(weighted.to(dtype))
        row_sums(sums.index(3 * slot + 2), written)
        fence_async_shared()
        read, erased = warpgroup_mma_wait(0, deps=[read, erased])
        # all have read S, and the tiles are there
        all_was_read(before, step)
        wait_for_copies(behind, step)
        wait_for_copies(shared, turn)
        stored = product(d, dstates, R)
        from_start = decays.slice(0, 64).load(L)
        to_end = decays.slice(64, 64).load(L)
        read *= (P.scale * from_start)[:, None]
        erased *= -from_start[:, None]
        read = added(read, dqk_tile, k)
        erased = added(erased, w_tile, k)
        stored = warpgroup_mma_wait(2, deps=[stored])
        all_was_read(behind, step)
        was_read(kept, step)
        stored *= to_end[:, None]
        stored_keys = stored * k.load(sums_layout(R)).to(gl.float32)
        row_sums(sums.index(3 * slot + 1), stored_keys)
        stored = added(stored, w_tile.permute([1, 0]), k)
        stored = added(stored, dqk_tile.permute([1, 0]), q)
        read, erased = warpgroup_mma_wait(2, deps=[read, erased])
        of_tokens = read * q.load(sums_layout(R)).to(gl.float32)
        stored = warpgroup_mma_wait(0, deps=[stored])
        of_tokens += (erased - stored) * k.load(sums_layout(R)).to(gl.float32)
        row_sums(sums.index(3 * slot), of_tokens)
        if P.group > 1:
            fresh = step % P.group == 0
            dquery = read + gl.where(fresh, 0.0, dquery)
            dkey = erased + stored + gl.where(fresh, 0.0, dkey)
        else:
            dquery, dkey = read, erased + stored
        if step % P.group == P.group - 1:
            # all products of all warps are done
            barrier()
            q.store(dquery.to(dtype))
            k.store(dkey.to(dtype))
        all_was_left(summed, step)


@gluon_jit
def hopper_gradients_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    vectors_ptr,
    dout_ptr,
    states_ptr,
    written_ptr,
    dstates_ptr,
    dr_ptr,
    dvalue_ptr,
    dquery_ptr,
    dkey_ptr,
    dg_ptr,
    dbeta_ptr,
    P: gl.constexpr,
    BATCH: gl.constexpr,
    BESIDE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = key_ptr.dtype.element_ty
    R: gl.constexpr = P.room
    V: gl.constexpr = 64 * P.value_blocks
    queries, keys = room_for(dtype, [64, R]), room_for(dtype, [64, R])
    ds = room_for(dtype, [2, 64, V])
    douts, dvs = room_for(dtype, [2, 64, V]), room_for(dtype, [2, 64, V])
    vectors = room_for_vectors(2)
    states, dstates = room_for(dtype, [V, R]), room_for(dtype, [V, R])
    dqk_tile, w_tile = room_for(dtype, [64, 64]), room_for(dtype, [64, 64])
    # of two steps: of tokens, stored and written, each of both halves of the warps
    TWO: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [6, 2, 64], TWO)
    COPY: gl.constexpr = 32 * BESIDE
    shared, kept, summed = ring(1, COPY), ring(2, COPY, 2), ring(2, 1)
    rings = shared, kept, ring(1, COPY, 2), ring(1, COPY, 2), summed
    programs = gl.num_programs(0)
    chunks = BATCH * P.chunks * P.key_heads - gl.program_id(0)
    steps = (chunks + programs - 1) // programs * P.group
    buffers = (queries, keys, ds, vectors, douts, dvs, states, dstates)
    results = (dquery_ptr, dkey_ptr, dg_ptr, dbeta_ptr)
    weak_pointers = (value_ptr, dr_ptr, dbeta_ptr)
    tiles = (dqk_tile, w_tile)
    pointers = (
        query_ptr,
        key_ptr,
        written_ptr,
        vectors_ptr,
        dout_ptr,
        dvalue_ptr,
        states_ptr,
        dstates_ptr,
    )
    warp_specialize(
        [
            (gradients, (weak_pointers, buffers, tiles, sums, rings, steps, P)),
            (gates, (results, buffers, sums, rings, steps, P)),
            (copy_steps, (pointers, buffers, rings, steps, P)),
        ],
        [BESIDE, BESIDE],
        [REGISTERS, REGISTERS],
    )
