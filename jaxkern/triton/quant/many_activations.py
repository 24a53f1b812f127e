"""The kernel of products of packed rows with 17 activations and more, for Hopper.

    y = x w^T

Weights are the left operand of the matrix units, which they take from registers: what a
lane unpacks of 16 rows of a tile is what m64nNk16 expects of it, but for the order of
the columns, in which the activations come to shared memory. So each weight is decoded
once for all activations of a program, next to the products of the weights before it.

A weight is scale * (code - zero) + offset. The scale is a sum of two bfloat16, so that
only the offset and the result are rounded; of MXFP4 one is exact.
"""

from jaxkern.gpu.bulk_ring import shared_word
from jaxkern.gpu.triton_call import (
    async_copy,
    async_load,
    constexpr_function,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.quant.block_codes import (
    codes_of,
    fragments_of_scale,
    has_offsets,
    is_power_of_two,
    is_signed,
    middle_of,
    read_step,
    scales_of,
)
from jaxkern.triton.quant.fixed_point_kernel import places_of_lanes
from jaxkern.triton.quant.fragments import (
    as_pair,
    barrier,
    fma_of_pairs,
    signed_codes,
    twice,
    unsigned_codes,
)
from jaxkern.triton.quant.one_activation import (
    low_float,
    shared_base,
    store_word,
)
from jaxkern.triton.quant.product_kernel import (
    begin_early,
    put,
    wait_for_those_ahead,
)


@constexpr_function
def sums_layout(WARPS, COLUMNS):
    """Of a product `[16 WARPS, COLUMNS]`."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])


@constexpr_function
def results_layout(WARPS):
    """Of results `[activations, weights]`, two neighbours a lane."""
    return gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])


@constexpr_function
def copies_layout(WARPS):
    """Of rows of 64 columns that are copied, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])


@gluon_jit
def in_two_parts(scale):
    """A float32 as the sum of two bfloat16, each twice in a word."""
    high = as_pair(scale, scale)
    rest = scale - low_float(high)
    return high, as_pair(rest, rest)


@gluon_jit
def factors_of(words, J: gl.constexpr, FORMAT: gl.constexpr):
    """Of each of the two rows of a lane: the scale in two parts, what is added."""
    scales = scales_of(words, J, FORMAT)
    rows = ()
    for i in gl.static_range(2):
        high, low = in_two_parts(scales[i])
        if is_power_of_two(FORMAT):
            rows += ((high, high, high * 0),)
        elif has_offsets(FORMAT):
            offset = gl.fma(scales[i], 1.0 * middle_of(FORMAT), scales[2 + i])
            rows += ((high, low, as_pair(offset, offset)),)
        else:
            rows += ((high, low, high * 0),)
    return rows


@gluon_jit
def two_numbers(pair):
    """The two bfloat16 of a word, side by side in a new last dim."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], (gl.int16, gl.int16), True, 1
    )
    both = gl.join(low, high)
    return both.to(gl.bfloat16, bitcast=True)


@gluon_jit
def weights_of_pair(pair, row, nothing, FORMAT: gl.constexpr):
    """Two codes as bfloat16 to two weights, `[warps, 8, 4, 2]`."""
    if not is_signed(FORMAT):
        less = nothing + twice(-128 - middle_of(FORMAT))
        pair = fma_of_pairs(pair, nothing + 0x3F803F80, less)
    high, low, offset = row
    if not is_power_of_two(FORMAT):
        offset = fma_of_pairs(pair, low, offset)
    return two_numbers(fma_of_pairs(pair, high, offset))


@gluon_jit
def weights_of_fragment(words, c, nothing, rows, F: gl.constexpr, FORMAT: gl.constexpr):
    """Weights of 16 columns, `[warps, 8, 4, pair, row, half]`."""
    first, second = codes_of(words, c, nothing, F, FORMAT)
    magic = nothing + 0x43434343
    if is_signed(FORMAT):
        a = signed_codes(first, second, magic, nothing + -0x407F4080)
    else:
        a = unsigned_codes(first, second, magic)
    left = gl.join(
        weights_of_pair(a[0], rows[0], nothing, FORMAT),
        weights_of_pair(a[1], rows[1], nothing, FORMAT),
    )
    right = gl.join(
        weights_of_pair(a[2], rows[0], nothing, FORMAT),
        weights_of_pair(a[3], rows[1], nothing, FORMAT),
    )
    return gl.join(left, right)


@gluon_jit
def weights_of_two(words, c, nothing, F: gl.constexpr, FORMAT: gl.constexpr):
    """Those of fragments F, which is even, and F + 1, in a new last dim."""
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    rows = factors_of(words, F // GROUP, FORMAT)
    first = weights_of_fragment(words, c, nothing, rows, F, FORMAT)
    if GROUP == 1:
        rows = factors_of(words, F + 1, FORMAT)
    second = weights_of_fragment(words, c, nothing, rows, F + 1, FORMAT)
    return gl.join(first, second)


@gluon_jit
def left_operand(
    words, c, nothing, Q: gl.constexpr, COLUMNS: gl.constexpr, FORMAT: gl.constexpr
):
    """Weights of 64 columns, `[16 warps, 64]`, as the matrix units take them."""
    WARPS: gl.constexpr = gl.num_warps()
    both = gl.join(
        weights_of_two(words, c, nothing, 4 * Q, FORMAT),
        weights_of_two(words, c, nothing, 4 * Q + 2, FORMAT),
    )
    # [warp, g, c, pair, row, half, f % 2, f // 2] -> [warp, row, g, f, half, c, pair]
    ordered = gl.permute(both, [0, 4, 1, 7, 6, 5, 2, 3])
    flat = gl.reshape(ordered, [16 * WARPS, 64])
    L: gl.constexpr = gl.DotOperandLayout(0, sums_layout(WARPS, COLUMNS), 2)
    return gl.convert_layout(flat, L, assert_trivial=True)


@gluon_jit
def copy_step(
    x_ptr,
    left,
    step,
    last,
    slabs,
    stage,
    K: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Starts the copy of a step's 256 columns of rows; zeros where there are none."""
    L: gl.constexpr = copies_layout(gl.num_warps())
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    for q in gl.static_range(4):
        first = step * 256 + q * 64
        there = (row < left) & (first + column < K) & (step < last)
        at = row * K + first + column
        async_load(slabs.index(stage * 4 + q), x_ptr + at, there)
    async_copy.commit_group()


@gluon_jit
def in_order_of_weights(totals, any, COLUMNS: gl.constexpr):
    """Sums `[16 warps, COLUMNS]` as `[COLUMNS, 16 warps]`, neighbours in two lanes.

    They go through the memory of the activations. Rows g and g + 8 of a tile's matrix
    are its weights 2 g and 2 g + 1.
    """
    WARPS: gl.constexpr = gl.num_warps()
    PITCH: gl.constexpr = 64 * WARPS + 32  # bytes: lanes meet different banks
    SUMS: gl.constexpr = sums_layout(WARPS, COLUMNS)
    memory = shared_base(any)  # where the activations lie, all that Triton places
    place = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, SUMS))
    weight = (place // 16 * 16 + place % 8 * 2 + place % 16 // 8)[:, None]
    row = gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))[None, :]
    barrier()  # all have done with the activations
    store_word(memory + row * PITCH + 4 * weight, totals.to(gl.int32, bitcast=True))
    barrier()
    OUT: gl.constexpr = results_layout(WARPS)
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, OUT))[:, None]
    weight = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, OUT))[None, :]
    words = shared_word(memory + row * PITCH + 4 * weight, 0)
    return words.to(gl.float32, bitcast=True)


@gluon_jit
def many_activations_kernel(
    x_ptr,
    tiles_ptr,
    residual_ptr,
    y_ptr,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    TILES: gl.constexpr,
    TILE_PAIRS: gl.constexpr,
    FORMAT: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[ROWS, K]` bfloat16, tiles_ptr `[TILES, 16 row_bytes]`, y `[ROWS, 16 TILES]`.

    Of each 16 columns of x those of a lane stand apart, see `in_order_of_lanes`. A
    program has a tile of each warp and one of BLOCKS of COLUMNS activations. Where the
    second axis has several programs, each has STEPS steps of the columns, and y is
    `[programs, ROWS, 16 TILES]`, the sums of each.
    """
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    warp, g, c = places_of_lanes(WARPS)
    first_tile = gl.program_id(0) // BLOCKS * WARPS
    block = gl.program_id(0) % BLOCKS
    pairs = tiles_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    tile = gl.minimum(first_tile + warp, TILES - 1)
    at = pairs + tile.to(gl.int64) * TILE_PAIRS
    first = gl.program_id(1) * STEPS
    last = gl.minimum(first + STEPS, (K + 255) // 256)
    words = read_step(at, g, c, first, NUM_BLOCKS, FORMAT)
    if AHEAD == 2:
        wait_for_those_ahead()
    slabs = gl.allocate_shared_memory(
        gl.bfloat16, [12, COLUMNS, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    rows = x_ptr + block * (COLUMNS * K)
    left = ROWS - block * COLUMNS
    for i in gl.static_range(2):
        copy_step(rows, left, first + i, last, slabs, i, K, COLUMNS)
    nothing = (at.to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    SUMS: gl.constexpr = sums_layout(WARPS, COLUMNS)
    totals = gl.zeros([16 * WARPS, COLUMNS], gl.float32, SUMS)
    L: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    before = gl.zeros([16 * WARPS, 64], gl.bfloat16, L)
    for step in range(first, last):
        async_copy.wait_group(1)
        barrier()  # all have the step's activations
        stage = (step - first) % 3
        ahead = read_step(at, g, c, gl.minimum(step + 1, last - 1), NUM_BLOCKS, FORMAT)
        for q in gl.static_range(4):
            w = left_operand(words, c, nothing, q, COLUMNS, FORMAT)
            x = slabs.index(stage * 4 + q).permute([1, 0])
            totals = warpgroup_mma(w, x, totals, is_async=True)
            # an operand in registers is in use until its product is done
            totals, before = warpgroup_mma_wait(1, deps=[totals, before])
            before = w
        # where the step before had its own: all warps have done with those
        to = (step - first + 2) % 3
        copy_step(rows, left, step + 2, last, slabs, to, K, COLUMNS)
        words = ahead
    totals, before = warpgroup_mma_wait(0, deps=[totals, before])
    async_copy.wait_group(0)  # zeros behind the last step come to where the sums go
    y = in_order_of_weights(totals, block, COLUMNS)
    OUT: gl.constexpr = results_layout(WARPS)
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, OUT))[:, None]
    column = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, OUT))[None, :]
    column += first_tile * 16
    there = (column < 16 * TILES) & (row < left)
    row += gl.program_id(1) * ROWS + block * COLUMNS
    put(y_ptr, residual_ptr, y, row * (16 * TILES) + column, there)
