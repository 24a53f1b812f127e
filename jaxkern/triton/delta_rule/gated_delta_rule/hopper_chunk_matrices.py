"""What each chunk needs whatever the state is, for GPUs of compute capability 9.0.

The results of chunk_matrices.py, with every layout written out. A warp inverts the
block of 16 on the diagonal that its rows have, in registers: it keeps the inverse and
the turned inverse, since the turned result of a matrix unit lies as a right operand
must. Blocks of 32 and 64 follow by products of the whole matrix. Operands of these
products are sums of two bfloat16, 16 bits, of which three products are added.
"""

from jaxkern.gpu.triton_call import (
    async_copy,
    fence_async_shared,
    gl,
    gluon_jit,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.delta_rule.gated_delta_rule.hopper_walk import (
    copy_rows,
    store_rows,
)
from jaxkern.triton.quant.fragments import barrier


@gluon_jit
def add(a, b):
    return a + b


@gluon_jit
def split(x):
    """x as a sum of two bfloat16, the first cut: that is no conversion of its own."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon_jit
def same_block(L: gl.constexpr):
    """Which elements of `[4, 16, 4, 16]` are in blocks on the diagonal."""
    row = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    column = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    return row[:, None, None, None] == column[None, None, :, None]


@gluon_jit
def diagonal_blocks(x, BLOCKS: gl.constexpr):
    """`[64, 64]` -> `[4, 16, 16]`: none leaves its thread."""
    x = gl.reshape(x, [4, 16, 4, 16])
    L: gl.constexpr = x.type.layout
    same = same_block(L)
    return gl.convert_layout(gl.sum(gl.where(same, x, 0.0), 2), BLOCKS, True)


@gluon_jit
def on_diagonal(blocks, WHOLE: gl.constexpr):
    """`[4, 16, 16]` -> `[64, 64]`: none leaves its thread."""
    nothing = gl.reshape(gl.zeros([64, 64], gl.float32, WHOLE), [4, 16, 4, 16])
    L: gl.constexpr = nothing.type.layout
    blocks = gl.convert_layout(blocks, gl.SliceLayout(2, L), True)
    x = gl.where(same_block(L), gl.expand_dims(blocks, 2), nothing)
    return gl.convert_layout(gl.reshape(x, [64, 64]), WHOLE, True)


@gluon_jit
def block_product(a, turned_b, BLOCKS: gl.constexpr):
    """a b of blocks that are sums of two bfloat16, b given turned: in registers."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BLOCKS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, BLOCKS, 2)
    high, low = gl.convert_layout(a[0], LEFT), gl.convert_layout(a[1], LEFT)
    b_high = gl.convert_layout(gl.permute(turned_b[0], [0, 2, 1]), RIGHT)
    b_low = gl.convert_layout(gl.permute(turned_b[1], [0, 2, 1]), RIGHT)
    sums = mma_v2(low, b_high, gl.zeros([4, 16, 16], gl.float32, BLOCKS))
    sums = mma_v2(high, b_low, sums)
    return mma_v2(high, b_high, sums)


@gluon_jit
def inverses_of_blocks(lower, upper, BLOCKS: gl.constexpr):
    """(I + lower)^-1 of blocks of 16, strictly lower; `upper` is `lower` turned."""
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    pair = i // 2 == j // 2
    x = gl.where(i == j, 1.0, 0.0) - gl.where(pair, lower, 0.0)
    turned = gl.where(i == j, 1.0, 0.0) - gl.where(pair, upper, 0.0)
    lower, upper = split(lower), split(upper)
    for k in gl.static_range(3):
        size = 2 << k
        pair = i // (2 * size) == j // (2 * size)
        xs, ts = split(x), split(turned)
        p = block_product(xs, upper, BLOCKS)
        p = gl.where(pair & (i // size > j // size), p, 0.0)
        r = block_product(ts, lower, BLOCKS)
        r = gl.where(pair & (i // size < j // size), r, 0.0)
        x = x - block_product(split(p), ts, BLOCKS)
        turned = turned - block_product(split(r), xs, BLOCKS)
    return x


@gluon_jit
def product(high, low, right_high, right_low, L: gl.constexpr):
    """The sum of two bfloat16 in registers times one in shared memory."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    high, low = gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)
    nothing = gl.zeros([64, 64], gl.float32, L)
    y = warpgroup_mma(low, right_high, nothing, use_acc=False, is_async=True)
    y = warpgroup_mma(high, right_low, y, is_async=True)
    y = warpgroup_mma(high, right_high, y, is_async=True)
    y, high, low = warpgroup_mma_wait(0, deps=[y, high, low])
    return y


@gluon_jit
def hopper_chunk_matrices_kernel(
    query_ptr,
    key_ptr,
    g_ptr,
    beta_ptr,
    matrices_ptr,
    vectors_ptr,
    ends_ptr,
    T: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    BLOCK_H: gl.constexpr,
    SCALE: gl.constexpr,
):
    CHUNK: gl.constexpr = 64
    KEYS: gl.constexpr = NUM_HEADS // GROUP * H
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    BLOCKS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # every warp has all
    dtype: gl.constexpr = matrices_ptr.dtype.element_ty
    chunk = gl.program_id(1)
    b = (gl.program_id(0) // NUM_HEADS).to(gl.int64)
    head = gl.program_id(0) % NUM_HEADS
    first = b * T + chunk * CHUNK
    left = T - chunk * CHUNK
    keys = gl.allocate_shared_memory(dtype, [CHUNK, BLOCK_H], SHARED)
    queries = gl.allocate_shared_memory(dtype, [CHUNK, BLOCK_H], SHARED)
    at = first * KEYS + head // GROUP * H
    copy_rows(keys, key_ptr + at, left, 0, KEYS, H)
    async_copy.commit_group()
    copy_rows(queries, query_ptr + at, left, 0, KEYS, H)
    async_copy.commit_group()

    token = gl.arange(0, CHUNK, LINE)
    gates = first * NUM_HEADS + head + token * NUM_HEADS
    g = gl.load(g_ptr + gates, token < left, 0.0).to(gl.float32)
    beta = gl.load(beta_ptr + gates, token < left, 0.0).to(gl.float32)
    # as running_decay of chunk_matrices.py
    total = gl.associative_scan(gl.where(g < -120.0, -120.0, g), 0, add)
    end = gl.sum(gl.where(token == CHUNK - 1, total, 0.0), 0)
    place = gl.program_id(0).to(gl.int64) * gl.num_programs(1) + chunk
    vectors = vectors_ptr + place * (3 * CHUNK) + token
    gl.store(vectors, gl.exp(total))
    gl.store(vectors + CHUNK, gl.exp(end - total))
    gl.store(vectors + 2 * CHUNK, beta)

    of_row = gl.convert_layout(total, gl.SliceLayout(1, WHOLE))[:, None]
    of_column = gl.convert_layout(total, gl.SliceLayout(0, WHOLE))[None, :]
    beta_of_row = gl.convert_layout(beta, gl.SliceLayout(1, WHOLE))[:, None]
    beta_of_column = gl.convert_layout(beta, gl.SliceLayout(0, WHOLE))[None, :]
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, WHOLE))[:, None]
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, WHOLE))[None, :]
    # of i > j and of i < j alike; never positive, so nothing overflows
    between = gl.exp(gl.where(row > column, of_row - of_column, of_column - of_row))
    async_copy.wait_group(1)
    fence_async_shared()
    barrier()
    nothing = gl.zeros([CHUNK, CHUNK], gl.float32, WHOLE)
    kk = warpgroup_mma(keys, keys.permute([1, 0]), nothing, use_acc=False)
    kk = kk * between
    a = gl.where(row > column, beta_of_row * kk, 0.0)
    turned = gl.where(row < column, beta_of_column * kk, 0.0)
    a_high, a_low = split(a)
    highs = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], SHARED, a_high)
    lows = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], SHARED, a_low)
    x = inverses_of_blocks(
        diagonal_blocks(a, BLOCKS), diagonal_blocks(turned, BLOCKS), BLOCKS
    )
    x = on_diagonal(x, WHOLE)
    x_highs = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], SHARED)
    x_lows = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], SHARED)
    for k in gl.static_range(2):
        size = 16 << k
        high, low = split(x)
        x_highs.store(high)
        x_lows.store(low)
        fence_async_shared()
        barrier()
        below = row // (2 * size) == column // (2 * size)
        below = below & (row // size > column // size)
        p = gl.where(below, product(high, low, highs, lows, WHOLE), 0.0)
        high, low = split(p)
        x = x - product(high, low, x_highs, x_lows, WHOLE)
    high, low = split(x)
    x_highs.store(high)
    x_lows.store(low)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    scores = warpgroup_mma(queries, keys.permute([1, 0]), nothing, use_acc=False)
    tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], SHARED, x.to(dtype))
    matrices = matrices_ptr + place * (2 * CHUNK * CHUNK)
    store_rows(matrices, tile, CHUNK, 0, CHUNK, CHUNK)
    between = gl.exp(gl.where(row >= column, of_row - of_column, 0.0))
    scores = gl.where(row >= column, SCALE * scores * between, 0.0)
    if ends_ptr is not None:
        # in the dtype of keys, whose product with it this is
        late = gl.exp(end - of_row) * x
        late_high = late.to(dtype)
        late_low = (late - late_high.to(gl.float32)).to(dtype)
        rights = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], SHARED, late_high)
        lefts = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], SHARED, late_low)
        fence_async_shared()
        barrier()
        none = gl.zeros([BLOCK_H, CHUNK], gl.float32, WHOLE)
        turned_keys = keys.permute([1, 0])
        ends = warpgroup_mma(turned_keys, rights, none, use_acc=False, is_async=True)
        ends = warpgroup_mma(turned_keys, lefts, ends, is_async=True)
        ends = warpgroup_mma_wait(0, deps=[ends])
        wide = gl.allocate_shared_memory(
            dtype, [BLOCK_H, CHUNK], SHARED, ends.to(dtype)
        )
        store_rows(ends_ptr + place * (H * CHUNK), wide, H, 0, CHUNK, CHUNK)
    high, low = split(scores)
    scores = product(high, low, x_highs, x_lows, WHOLE)
    tile.store(scores.to(dtype))
    store_rows(matrices + CHUNK * CHUNK, tile, CHUNK, 0, CHUNK, CHUNK)
