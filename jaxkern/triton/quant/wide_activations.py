"""The kernel of products of packed rows with hundreds of activations, for Hopper.

    y = x w^T

As many_activations.py, with 256 activations a tile: a weight is decoded once for all of
them. The next 64 columns are decoded between the products of these, which hides a
fourth of that at most. Programs walk over tiles of the result, and copies of
activations go on across the tiles. Words are put in the order of columns
(column_order.py), so activations are copied as they lie.
"""

from jaxkern.gpu.triton_call import (
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.quant.block_codes import read_step
from jaxkern.triton.quant.column_order import in_order_of_columns
from jaxkern.triton.quant.fixed_point_kernel import places_of_lanes
from jaxkern.triton.quant.fragments import as_pair, barrier
from jaxkern.triton.quant.many_activations import left_operand, sums_layout
from jaxkern.triton.quant.one_activation import shared_base
from jaxkern.triton.quant.several_activations import (
    copy_16_bytes,
    end_of_copies,
    wait_for_copies,
)


@constexpr_function
def slots_of_ring():
    """Slabs of 64 columns of x: one is read, one was, four are on their way."""
    return 6


@constexpr_function
def chunks_layout(WARPS):
    """Of rows of 64 columns that are copied, an element for 16 bytes."""
    return gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])


@gluon_jit
def copy_slab(rows, left, column, memory, slot, K: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts the copy of 64 columns, from `column` on, of COLUMNS rows to a slot.

    Zeros where there are none; `left` is how many rows there are.
    """
    L: gl.constexpr = chunks_layout(gl.num_warps())
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, L))[:, None]
    chunk = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    # 128 bytes a row, whose chunks are swizzled as wgmma expects them
    to = memory + slot * (COLUMNS * 128) + row * 128 + (chunk ^ row % 8) * 16
    at = column + chunk * 8
    there = (row < left) & (at < K)
    source = (rows + gl.where(there, row * K + at, 0)).to(gl.int64)
    copy_16_bytes(to, source, gl.where(there, 16, 0))
    end_of_copies(slot)


@gluon_jit
def put_tile(
    totals,
    residual_ptr,
    y_ptr,
    first_tile,
    block,
    left,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Sums `[16 warps, COLUMNS]` to y. Rows g and g + 8 are weights 2 g and 2 g + 1."""
    WARPS: gl.constexpr = gl.num_warps()
    apart = gl.reshape(totals, [WARPS, 2, 8, COLUMNS])
    first, second = gl.split(gl.permute(apart, [0, 2, 3, 1]))
    L: gl.constexpr = first.type.layout
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    row = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    tile = first_tile + warp
    there = (row < left) & (tile < TILES) & (g < 8)
    start = block.to(gl.int64) * (COLUMNS * 16 * TILES)
    at = row * (16 * TILES) + tile * 16 + 2 * g
    if residual_ptr is not None:
        first += gl.load(residual_ptr + start + at, there, 0).to(gl.float32)
        second += gl.load(residual_ptr + start + at + 1, there, 0).to(gl.float32)
    if y_ptr.dtype.element_ty == gl.bfloat16:
        pairs = (y_ptr + start).to(gl.pointer_type(gl.int32), bitcast=True)
        gl.store(pairs + at // 2, as_pair(first, second), there)
    else:
        gl.store(y_ptr + start + at, first.to(y_ptr.dtype.element_ty), there)
        gl.store(y_ptr + start + at + 1, second.to(y_ptr.dtype.element_ty), there)


@gluon_jit
def wide_activations_kernel(
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
    ITEMS: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """x `[ROWS, K]` bfloat16, tiles_ptr `[TILES, 16 row_bytes]`, y `[ROWS, 16 TILES]`.

    An item is a tile of each warp and one of BLOCKS of COLUMNS activations; a program
    takes every PROGRAMS-th of ITEMS.
    """
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (K + 255) // 256
    SLOTS: gl.constexpr = slots_of_ring()
    LATER: gl.constexpr = SLOTS - 2  # slabs on their way
    warp, g, c = places_of_lanes(WARPS)
    pairs = tiles_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    slabs = gl.allocate_shared_memory(
        gl.bfloat16, [SLOTS, COLUMNS, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    block = gl.program_id(0) % BLOCKS
    tile = gl.minimum(gl.program_id(0) // BLOCKS * WARPS + warp, TILES - 1)
    at = pairs + tile.to(gl.int64) * TILE_PAIRS
    memory = shared_base(block)  # of the slabs, all that Triton places
    rows = x_ptr + block.to(gl.int64) * (COLUMNS * K)
    for i in gl.static_range(LATER):
        copy_slab(rows, ROWS - block * COLUMNS, i * 64, memory, i, K, COLUMNS)
    nothing = (at.to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    words = read_step(at, g, c, 0, NUM_BLOCKS, FORMAT)
    words = in_order_of_columns(words, g, c, FORMAT)
    SUMS: gl.constexpr = sums_layout(WARPS, COLUMNS)
    L: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    before = gl.zeros([16 * WARPS, 64], gl.bfloat16, L)
    w = left_operand(words, c, nothing, 0, COLUMNS, FORMAT)
    slot = block * 0
    for index in range(gl.program_id(0), ITEMS, PROGRAMS):
        item = index + slot * 0
        block = item % BLOCKS
        first_tile = item // BLOCKS * WARPS
        rows = x_ptr + block.to(gl.int64) * (COLUMNS * K)
        left = ROWS - block * COLUMNS
        tile = gl.minimum(first_tile + warp, TILES - 1)
        at = pairs + tile.to(gl.int64) * TILE_PAIRS
        later = item + PROGRAMS
        later_block = later % BLOCKS
        later_rows = x_ptr + later_block.to(gl.int64) * (COLUMNS * K)
        later_left = gl.where(later < ITEMS, ROWS - later_block * COLUMNS, 0)
        tile = gl.minimum(later // BLOCKS * WARPS + warp, TILES - 1)
        later_at = pairs + tile.to(gl.int64) * TILE_PAIRS
        totals = gl.zeros([16 * WARPS, COLUMNS], gl.float32, SUMS)
        for step in range(0, STEPS):
            for q in gl.static_range(4):
                wait_for_copies(nothing, LATER - 1)
                fence_async_shared()
                barrier()  # the slab is there, and all have done with the last but one
                x = slabs.index(slot).permute([1, 0])
                totals = warpgroup_mma(w, x, totals, is_async=True)
                if q == 1:  # not before: registers are few
                    ends = step == STEPS - 1
                    source = gl.where(ends, later_at, at)
                    number = gl.where(ends, 0, step + 1)
                    ahead = read_step(source, g, c, number, NUM_BLOCKS, FORMAT)
                column = step * 256 + 64 * (q + LATER)
                over = column >= STEPS * 256
                copy_slab(
                    gl.where(over, later_rows, rows),
                    gl.where(over, later_left, left),
                    gl.where(over, column - STEPS * 256, column),
                    memory,
                    (slot + LATER) % SLOTS,
                    K,
                    COLUMNS,
                )
                # an operand in registers is in use until its product is done
                totals, before = warpgroup_mma_wait(1, deps=[totals, before])
                before = w
                if q == 3:
                    words = in_order_of_columns(ahead, g, c, FORMAT)
                w = left_operand(words, c, nothing, (q + 1) % 4, COLUMNS, FORMAT)
                slot = (slot + 1) % SLOTS
        totals, before = warpgroup_mma_wait(0, deps=[totals, before])
        put_tile(totals, residual_ptr, y_ptr, first_tile, block, left, TILES, COLUMNS)
    wait_for_copies(nothing, 0)
