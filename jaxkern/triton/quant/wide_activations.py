"""The kernel of products of packed rows with hundreds of activations, for Hopper.

    y = x w^T

As many_activations.py, with 256 activations a tile: a weight is decoded once for all of
them, and decoding the next 64 columns runs beside the product of these. Programs walk
over tiles of the result, and copies of activations go on across the tiles, so that the
matrix units wait only while a tile is written. Words are put in the order of columns
(column_order.py), so activations are copied as they lie.

All programs have as many steps. Where tiles do not divide evenly, the first ones of a
program are a stretch of steps that begins and ends within tiles: what a program has of
the end of a tile it leaves in `parts`, and the program before, which has the beginning,
adds it. It waits for nothing else, so sums are added in one order and none waits long.
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
    place,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Sums `[16 warps, COLUMNS]` to y. Rows g and g + 8 are weights 2 g and 2 g + 1.

    `place`: the first tile of weights, the block of activations, how many it has.
    """
    first_tile, block, left = place
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
def wait_for_flag(at):
    """Returns when the number there is not 0; what was written before it is there."""
    gl.inline_asm_elementwise(
        """{ .reg .pred unset; .reg .b32 flag;
        AGAIN: ld.acquire.gpu.global.b32 flag, [$1]; setp.eq.b32 unset, flag, 0;
        @unset bra AGAIN; mov.b32 $0, flag; }""",
        "=r,l",
        [at.to(gl.int64)],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def set_flag(at):
    """When all threads have written what is behind the flag."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, 0; // $1",
        "=r,l",
        [at.to(gl.int64)],
        gl.int32,
        False,
        1,
    )
    barrier()
    gl.inline_asm_elementwise(
        "st.release.gpu.global.b32 [$1], 1; mov.b32 $0, 0;",
        "=r,l",
        [at.to(gl.int64)],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def item_and_step(
    turn,
    stretch,
    first,
    WHOLE: gl.constexpr,
    STEPS: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Where a program is at a turn: first a stretch of turns, then items as a whole.

    Step 0 of the stretch is step `first` of the items from WHOLE on.
    """
    flat = first + turn
    rest = turn - stretch
    whole = gl.program_id(0) + rest // STEPS * PROGRAMS
    item = gl.where(turn < stretch, WHOLE + flat // STEPS, whole)
    return item, gl.where(turn < stretch, flat % STEPS, rest % STEPS)


@gluon_jit
def wide_activations_kernel(
    x_ptr,
    tiles_ptr,
    residual_ptr,
    flags_ptr,
    y_ptr,
    set_ptr,
    parts_ptr,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    TILES: gl.constexpr,
    TILE_PAIRS: gl.constexpr,
    FORMAT: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    ITEMS: gl.constexpr,
    WHOLE: gl.constexpr,
    PROGRAMS: gl.constexpr,
    FENCE: gl.constexpr,
    READ_AT: gl.constexpr,
):
    """x `[ROWS, K]` bfloat16, tiles_ptr `[TILES, 16 row_bytes]`, y `[ROWS, 16 TILES]`.

    An item is a tile of each warp and one of BLOCKS of COLUMNS activations. A program
    takes every PROGRAMS-th of the first WHOLE of ITEMS, and as many steps as the others
    of those behind. flags_ptr and set_ptr, the same numbers, are 0 at first.
    """
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (K + 255) // 256
    SLOTS: gl.constexpr = slots_of_ring()
    LATER: gl.constexpr = SLOTS - 2  # slabs on their way, those of a step
    program = gl.program_id(0)
    shared = program.to(gl.int64) * 0 + (ITEMS - WHOLE) * STEPS
    first = (program * shared // PROGRAMS).to(gl.int32)
    stretch = ((program + 1) * shared // PROGRAMS).to(gl.int32) - first
    total = stretch + WHOLE // PROGRAMS * STEPS
    warp, g, c = places_of_lanes(WARPS)
    pairs = tiles_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    slabs = gl.allocate_shared_memory(
        gl.bfloat16, [SLOTS, COLUMNS, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    memory = shared_base(program)  # of the slabs, all that Triton places
    turn = program * 0
    item, step = item_and_step(turn, stretch, first, WHOLE, STEPS, PROGRAMS)
    rows = x_ptr + (item % BLOCKS).to(gl.int64) * (COLUMNS * K)
    left = ROWS - item % BLOCKS * COLUMNS
    for q in gl.static_range(LATER):
        copy_slab(rows, left, step * 256 + q * 64, memory, q, K, COLUMNS)
    tile = gl.minimum(item // BLOCKS * WARPS + warp, TILES - 1)
    at = pairs + tile.to(gl.int64) * TILE_PAIRS
    nothing = (at.to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    words = read_step(at, g, c, step, NUM_BLOCKS, FORMAT)
    words = in_order_of_columns(words, g, c, FORMAT)
    SUMS: gl.constexpr = sums_layout(WARPS, COLUMNS)
    L: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    before = gl.zeros([16 * WARPS, 64], gl.bfloat16, L)
    w = left_operand(words, c, nothing, 0, COLUMNS, FORMAT)
    slot = program * 0
    while turn < total:
        item, start = item_and_step(turn, stretch, first, WHOLE, STEPS, PROGRAMS)
        last = gl.where(turn < stretch, stretch - turn, STEPS)
        count = gl.minimum(STEPS - start, last)
        totals = gl.zeros([16 * WARPS, COLUMNS], gl.float32, SUMS)
        for _ in range(0, count):
            turn = turn + 1
            later, step = item_and_step(turn, stretch, first, WHOLE, STEPS, PROGRAMS)
            later = gl.minimum(later, ITEMS - 1)  # behind the last there is nothing
            rows = x_ptr + (later % BLOCKS).to(gl.int64) * (COLUMNS * K)
            left = gl.where(turn < total, ROWS - later % BLOCKS * COLUMNS, 0)
            tile = gl.minimum(later // BLOCKS * WARPS + warp, TILES - 1)
            at = pairs + tile.to(gl.int64) * TILE_PAIRS
            for q in gl.static_range(4):
                wait_for_copies(nothing, LATER - 1)
                if FENCE:
                    fence_async_shared()
                barrier()  # the slab is there, and all have done with the last but one
                x = slabs.index(slot).permute([1, 0])
                totals = warpgroup_mma(w, x, totals, is_async=True)
                if q == READ_AT:
                    ahead = read_step(at, g, c, step, NUM_BLOCKS, FORMAT)
                to, column = (slot + LATER) % SLOTS, step * 256 + q * 64
                copy_slab(rows, left, column, memory, to, K, COLUMNS)
                # an operand in registers is in use until its product is done
                totals, before = warpgroup_mma_wait(1, deps=[totals, before])
                before = w
                if q == 3:
                    words = in_order_of_columns(ahead, g, c, FORMAT)
                w = left_operand(words, c, nothing, (q + 1) % 4, COLUMNS, FORMAT)
                slot = (slot + 1) % SLOTS
        totals, before = warpgroup_mma_wait(0, deps=[totals, before])
        row = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, SUMS))[:, None]
        own = row * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))[None, :]
        if start > 0:
            gl.store(parts_ptr + program * (16 * WARPS * COLUMNS) + own, totals)
            set_flag(set_ptr + program)
        else:
            if count < STEPS:
                wait_for_flag(set_ptr + program + 1)
                theirs = parts_ptr + (program + 1) * (16 * WARPS * COLUMNS)
                totals = totals + gl.load(theirs + own, volatile=True)
            left = ROWS - item % BLOCKS * COLUMNS
            place = item // BLOCKS * WARPS, item % BLOCKS, left
            put_tile(totals, residual_ptr, y_ptr, place, TILES, COLUMNS)
    wait_for_copies(nothing, 0)
