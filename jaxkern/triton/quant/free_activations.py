"""Trial: many_activations.py with products of its own."""

from jaxkern.gpu.bulk_ring import shared_word
from jaxkern.gpu.triton_call import async_copy, fence_async_shared, gl, gluon_jit
from jaxkern.triton.quant.block_codes import read_step
from jaxkern.triton.quant.fixed_point_kernel import places_of_lanes
from jaxkern.triton.quant.fragments import barrier
from jaxkern.triton.quant.many_activations import copy_step, results_layout
from jaxkern.triton.quant.many_in_clusters import (
    awaited,
    multiplied,
    words_of_columns,
)
from jaxkern.triton.quant.one_activation import shared_base
from jaxkern.triton.quant.product_kernel import (
    begin_early,
    put,
    wait_for_those_ahead,
)
from jaxkern.triton.quant.several_activations import store_two_floats


@gluon_jit
def free_activations_kernel(
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
    copy_step(rows, left, first, last, slabs, 0, K, COLUMNS)
    nothing = (at.to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    memory = shared_base(c)  # where the activations lie, all that Triton places
    # of rows of 64 columns: 1 kB from eight to eight, swizzled by 128 bytes
    described = (memory >> 4).to(gl.int64) + ((1 << 62) + (64 << 32) + (1 << 16))
    zero = (nothing * 0).to(gl.float32)
    totals = ()
    for _ in gl.static_range(COLUMNS // 2):
        totals += (zero,)
    before = ()
    for _ in gl.static_range(16):
        before += (nothing,)
    for step in range(first, last):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()  # all have the step's activations
        stage = (step - first) % 3
        # read last two steps ago: all warps have done with those
        to = (step - first + 1) % 3
        copy_step(rows, left, step + 1, last, slabs, to, K, COLUMNS)
        ahead = read_step(at, g, c, gl.minimum(step + 1, last - 1), NUM_BLOCKS, FORMAT)
        for q in gl.static_range(4):
            w = words_of_columns(words, c, nothing, q, FORMAT)
            slab = described + (stage * 4 + q) * (COLUMNS * 8)
            totals = multiplied(w, slab, totals, COLUMNS)
            # an operand in registers is in use until its product is done
            found = awaited(totals, before, 1, COLUMNS)
            totals = found[: COLUMNS // 2]
            before = w
        words = ahead
    found = awaited(totals, before, 0, COLUMNS)
    totals = found[: COLUMNS // 2]
    PITCH: gl.constexpr = 64 * WARPS + 16  # bytes: lanes meet different banks
    barrier()  # all have done with the activations
    to = memory + warp * 64 + g * 8 + c * (2 * PITCH)
    for e in gl.static_range(COLUMNS // 8):
        put_at = to + e * (8 * PITCH)
        store_two_floats(put_at, totals[4 * e], totals[4 * e + 2], 1 + 0 * c)
        put_at = put_at + PITCH
        store_two_floats(put_at, totals[4 * e + 1], totals[4 * e + 3], 1 + 0 * c)
    barrier()
    OUT: gl.constexpr = results_layout(WARPS)
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, OUT))[:, None]
    column = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, OUT))[None, :]
    from_ = row * PITCH + 4 * column
    from_ += shared_base(from_)
    y = shared_word(from_, 0).to(gl.float32, bitcast=True)
    column += first_tile * 16
    there = (column < 16 * TILES) & (row < left)
    row += gl.program_id(1) * ROWS + block * COLUMNS
    put(y_ptr, residual_ptr, y, row * (16 * TILES) + column, there)
