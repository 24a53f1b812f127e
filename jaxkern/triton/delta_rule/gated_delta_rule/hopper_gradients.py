"""The gradients of gradients.py in one kernel, for GPUs of compute capability 9.0.

The formulas are the same. Here all that a chunk of a value head needs comes to shared
memory once, and what pairs of its tokens give never leaves the multiprocessor. W^T and
dqk^T are tiles of shared memory that the matrix units read turned.

A program has a multiprocessor to itself and goes over chunks of key heads, of each over
the value heads that share it: a step. Half of its eight warps has half of the columns
of every product. Four warps beside them copy, as soon as there is room: of the next
step queries, keys, d and decays have places of their own, dout, dr and S come when
this step has read its own, D when all is done.
"""

from jaxkern.gpu.triton_call import (
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.delta_rule.gated_delta_rule.hopper_tiles import (
    all_was_read,
    copies_layout,
    copy_rows,
    copy_vectors,
    places,
    ring,
    room_for,
    room_for_vectors,
    store_rows,
    wait_for_copies,
    wait_for_room,
    will_come,
)
from jaxkern.triton.quant.fragments import barrier

LARGEST = 128  # dims of a head


@constexpr_function
def sums_layout(columns):
    """Of a product `[64, columns]`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


@constexpr_function
def rows_layout(columns):
    """Of a number of each token, beside such a product."""
    return gl.SliceLayout(1, sums_layout(columns))


@constexpr_function
def line_layout(warps):
    """Of numbers that are summed along the tokens."""
    return gl.BlockedLayout([1], [32], [warps], [0])


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
def is_strong(beta):
    """As in gradients.py."""
    return gl.maximum(beta, -beta) >= 0.015625


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
    return P.tokens - chunk * 64, keys, token * P.heads + head, at_chunk


@gluon_jit
def copy_states(states, ptr, at_chunk, P: gl.constexpr):
    copy_rows(states, ptr + at_chunk * (P.h * P.hv), P.hv, 0, P.h, P.h)


@gluon_jit
def copy_steps(pointers, buffers, rings, steps, P: gl.constexpr):
    """What the four warps beside the products do."""
    query_ptr, key_ptr, written_ptr, vectors_ptr, dout_ptr = pointers[:5]
    dr_ptr, states_ptr, dstates_ptr = pointers[5:]
    queries, keys, ds, vectors, douts, drs, states, dstates = buffers
    kept, first, last = rings
    for step in range(steps):
        left, at_keys, at_tokens, at_chunk = of_step(step, P)
        at_values = at_tokens * P.hv
        slot = step % 2
        wait_for_room(kept, step)
        copy_rows(queries.index(slot), query_ptr + at_keys, left, 0, P.keys, P.h)
        copy_rows(keys.index(slot), key_ptr + at_keys, left, 0, P.keys, P.h)
        rows = written_ptr + at_values
        copy_rows(ds.index(slot), rows, left, 0, P.values, P.hv)
        copy_vectors(vectors.index(slot), vectors_ptr + at_chunk * (4 * 64))
        will_come(kept, step)
        wait_for_room(first, step)
        copy_rows(douts, dout_ptr + at_values, left, 0, P.values, P.hv)
        copy_rows(drs, dr_ptr + at_values, left, 0, P.values, P.hv)
        copy_states(states, states_ptr, at_chunk, P)
        will_come(first, step)
        wait_for_room(last, step)
        copy_states(dstates, dstates_ptr, at_chunk, P)
        will_come(last, step)


@gluon_jit
def one_sum(x, y):
    return x + y


@gluon_jit
def two_sums(a, b, x, y):
    return a + x, b + y


@gluon_jit
def row_sums(x, y):
    """Of two products, whatever their columns."""
    x, y = gl.reduce((x, y), 1, two_sums)
    return gl.convert_layout(x, rows_layout(64)), gl.convert_layout(y, rows_layout(64))


@gluon_jit
def of_pairs(dqk, dkk, qk, kk, total, earlier, beta, P: gl.constexpr):
    """(dqk, W, by pairs what they add to the sums of g and, by rows, to dbeta)."""
    L: gl.constexpr = sums_layout(64)
    row = gl.arange(0, 64, rows_layout(64))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    beta = beta[:, None]
    between = gl.exp(gl.where(row >= column, total[:, None] - earlier, 0.0))
    dqk = gl.where(row >= column, P.scale * between * dqk, 0.0)
    strong = is_strong(beta)
    on_written = gl.where(row == column, dkk, 0.0) / gl.where(strong, beta, 1.0)
    dkk = gl.where(row > column, -between * dkk, 0.0)
    weighted = beta * dkk
    pairs = dqk * qk + weighted * kk
    return dqk, weighted, pairs, gl.where(strong, on_written, dkk * kk)


@gluon_jit
def gradient_of_value(drs, beta, value_ptr, dvalue_ptr, left, P: gl.constexpr):
    """Leaves dv = beta dr; returns dr . v of each token, if one is weak."""
    SHAPE: gl.constexpr = drs.shape
    L: gl.constexpr = copies_layout(SHAPE[1], gl.num_warps())
    at, inside = places(left, 0, P.values, P.hv, SHAPE)
    dr = drs.load(L).to(gl.float32)
    widened = gl.convert_layout(beta, gl.SliceLayout(1, L))[:, None]
    dvalue = (widened * dr).to(dvalue_ptr.dtype.element_ty)
    gl.store(dvalue_ptr + at, dvalue, inside)
    on_value = gl.zeros([64], gl.float32, gl.SliceLayout(1, L))
    if gl.sum(gl.where(is_strong(beta), 0, 1), 0) > 0:
        value = gl.load(value_ptr + at, inside, 0.0).to(gl.float32)
        on_value = gl.sum(dr * value, 1)
    return gl.convert_layout(on_value, rows_layout(64))


@gluon_jit
def across(states, dstates):
    """<S, D>, some rows at a time."""
    ROWS: gl.constexpr = states.shape[0]
    L: gl.constexpr = copies_layout(states.shape[1], gl.num_warps())
    sums = gl.zeros([32], gl.float32, gl.SliceLayout(1, L))
    for i in gl.static_range(ROWS // 32):
        before = states.slice(32 * i, 32).load(L).to(gl.float32)
        after = dstates.slice(32 * i, 32).load(L).to(gl.float32)
        sums += gl.sum(before * after, 1)
    return gl.sum(sums, 0)


@gluon_jit
def gradients(results, buffers, tiles, rings, steps, P: gl.constexpr):
    value_ptr, dquery_ptr, dkey_ptr, dvalue_ptr, dg_ptr, dbeta_ptr = results
    queries, keys, ds, vectors, douts, drs, states, dstates = buffers
    dqk_tile, w_tile = tiles
    kept, first, last = rings
    dtype: gl.constexpr = dkey_ptr.dtype.element_ty
    R: gl.constexpr = P.room
    L: gl.constexpr = rows_layout(64)
    EARLIER: gl.constexpr = gl.SliceLayout(0, sums_layout(64))
    LINE: gl.constexpr = line_layout(gl.num_warps())
    token, line = gl.arange(0, 64, L), gl.arange(0, 64, LINE)
    dquery = gl.zeros([64, R], gl.float32, sums_layout(R))
    dkey = gl.zeros([64, R], gl.float32, sums_layout(R))
    for step in range(steps):
        slot = step % 2
        left, at_keys, at_tokens, _ = of_step(step, P)
        q, k, d = queries.index(slot), keys.index(slot), ds.index(slot)
        decays = vectors.index(slot)
        wait_for_copies(kept, step)
        beta = decays.slice(2 * 64, 64).load(L)
        total = decays.slice(3 * 64, 64).load(L)
        earlier = decays.slice(3 * 64, 64).load(EARLIER)[None, :]
        qk = product(q, k.permute([1, 0]), 64)
        kk = product(k, k.permute([1, 0]), 64)
        wait_for_copies(first, step)
        dqk = product(douts, d.permute([1, 0]), 64)
        dkk = product(drs, d.permute([1, 0]), 64)
        dqk, dkk, qk, kk = warpgroup_mma_wait(0, deps=[dqk, dkk, qk, kk])
        dqk, weighted, pairs, on_beta = of_pairs(
            dqk, dkk, qk, kk, total, earlier, beta, P
        )
        dqk_tile.store(dqk.to(dtype))
        w_tile.store(weighted.to(dtype))
        fence_async_shared()
        barrier()
        at_values = at_tokens * P.hv
        on_value = gradient_of_value(
            drs, beta, value_ptr + at_values, dvalue_ptr + at_values, left, P
        )
        later, dbeta = row_sums(pairs, on_beta)
        later -= gl.convert_layout(gl.sum(pairs, 0), L)
        wait_for_copies(last, step)
        at_end = gl.sum(decays.slice(63, 1).load(L), 0) * across(states, dstates)
        read = product(douts, states, R)
        erased = product(drs, states, R)
        read, erased = warpgroup_mma_wait(0, deps=[read, erased])
        # all have read dout, dr and S
        all_was_read(first, step)
        stored = product(d, dstates, R)
        fresh = step % P.group == 0
        from_start = decays.slice(0, 64).load(rows_layout(R))[:, None]
        read *= P.scale * from_start
        erased *= from_start
        query = q.load(sums_layout(R)).to(gl.float32)
        key = k.load(sums_layout(R)).to(gl.float32)
        on_query, on_key = row_sums(read * query, erased * key)
        dquery = read + gl.where(fresh, 0.0, dquery)
        dkey = gl.where(fresh, 0.0, dkey) - beside(beta, R) * erased
        dquery = added(dquery, dqk_tile, k)
        dkey = added(dkey, w_tile, k)
        dkey = added(dkey, w_tile.permute([1, 0]), k)
        dkey = added(dkey, dqk_tile.permute([1, 0]), q)
        stored = warpgroup_mma_wait(4, deps=[stored])
        stored *= decays.slice(64, 64).load(rows_layout(R))[:, None]
        key = k.load(sums_layout(R)).to(gl.float32)
        to_state = gl.convert_layout(gl.sum(stored * key, 1), L)
        later += on_query - beta * on_key - to_state
        dbeta += gl.where(is_strong(beta), 0.0, on_value - on_key)
        gl.store(dbeta_ptr + (at_tokens + token * P.heads), dbeta, token < left)
        later = gl.convert_layout(later, LINE)
        dg = gl.associative_scan(later, 0, one_sum, reverse=True)
        dg += gl.sum(to_state, 0) + at_end
        gl.store(dg_ptr + (at_tokens + line * P.heads), dg, line < left)
        dquery, dkey = warpgroup_mma_wait(0, deps=[dquery, dkey])
        dkey += stored
        # all products are done
        all_was_read(last, step)
        if step % P.group == P.group - 1:
            q.store(dquery.to(dtype))
            k.store(dkey.to(dtype))
            barrier()
            store_rows(dquery_ptr + at_keys, q, left, 0, P.keys, P.h)
            store_rows(dkey_ptr + at_keys, k, left, 0, P.keys, P.h)
        all_was_read(kept, step)


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
    dquery_ptr,
    dkey_ptr,
    dvalue_ptr,
    dg_ptr,
    dbeta_ptr,
    P: gl.constexpr,
    BATCH: gl.constexpr,
):
    dtype: gl.constexpr = key_ptr.dtype.element_ty
    R: gl.constexpr = P.room
    V: gl.constexpr = 64 * P.value_blocks
    queries = room_for(dtype, [2, 64, R])
    keys = room_for(dtype, [2, 64, R])
    ds = room_for(dtype, [2, 64, V])
    vectors = room_for_vectors(2)
    douts, drs = room_for(dtype, [64, V]), room_for(dtype, [64, V])
    states, dstates = room_for(dtype, [V, R]), room_for(dtype, [V, R])
    tiles = room_for(dtype, [64, 64]), room_for(dtype, [64, 64])
    rings = ring(2), ring(1), ring(1)
    programs = gl.num_programs(0)
    chunks = BATCH * P.chunks * P.key_heads - gl.program_id(0)
    steps = (chunks + programs - 1) // programs * P.group
    buffers = (queries, keys, ds, vectors, douts, drs, states, dstates)
    results = (value_ptr, dquery_ptr, dkey_ptr, dvalue_ptr, dg_ptr, dbeta_ptr)
    pointers = (
        query_ptr,
        key_ptr,
        written_ptr,
        vectors_ptr,
        dout_ptr,
        dr_ptr,
        states_ptr,
        dstates_ptr,
    )
    warp_specialize(
        [
            (gradients, (results, buffers, tiles, rings, steps, P)),
            (copy_steps, (pointers, buffers, rings, steps, P)),
        ],
        [4],
        [40],
    )
