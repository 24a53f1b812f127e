"""The kernels of products of sorted rows with the packed weights of their expert.

    hidden   act(gate[e] x, up[e] x) of each slot of expert e
    y        down[e] hidden

A program has a tile of the table of `gpu/moe/row_tiles.py`: up to COLUMNS slots of one
expert. Its warps have 16 rows of weights each, which they decode in registers as the
left operand of Hopper's matrix units (many_activations.py). Half of the warps have gate
and half up, so that both are from one reading of x, and meet at the end.

Slots are not moved: `order` says which slot a row of the table is, so that x is read
and the result written where they lie. Nothing is added in an order that changes.
"""

from jaxkern.gpu.triton_call import (
    async_copy,
    async_load,
    constexpr_function,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.quant.block_codes import read_step
from jaxkern.triton.quant.expert_rows import gated, with_bias
from jaxkern.triton.quant.fixed_point_kernel import places_of_lanes
from jaxkern.triton.quant.fragments import barrier
from jaxkern.triton.quant.many_activations import (
    copies_layout,
    left_operand,
    sums_layout,
)
from jaxkern.triton.quant.row_fours import is_by_rows, read_by_rows


@constexpr_function
def results_layout(WARPS, PARTS):
    """Of results `[rows, COLUMNS, PARTS]`: rows of weights lie side by side."""
    return gl.BlockedLayout([2, 1, PARTS], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])


@gluon_jit
def read_tile(at, g, c, step, GROUPS: gl.constexpr, FORMAT: gl.constexpr):
    """All words of a lane of one step; `at` has the addresses of a tile's arrays."""
    if is_by_rows(FORMAT):
        return read_by_rows(at[0], at[1], g, c, step, GROUPS)
    else:
        return read_step(at[0], g, c, step, GROUPS, FORMAT)


@gluon_jit
def copy_rows(
    x_ptr,
    rows,
    there,
    step,
    last,
    slabs,
    stage,
    WIDTH: gl.constexpr,
):
    """Starts the copy of a step's 256 columns of rows; zeros where there are none.

    `rows` has where each begins.
    """
    L: gl.constexpr = copies_layout(gl.num_warps())
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    for q in gl.static_range(4):
        first = step * 256 + q * 64
        mask = there & (first + column < WIDTH) & (step < last)
        async_load(slabs.index(stage * 4 + q), x_ptr + (rows + first + column), mask)
    async_copy.commit_group()


@gluon_jit
def sums_of_tile(
    x_ptr,
    rows,
    there,
    at,
    steps,
    WIDTH: gl.constexpr,
    GROUPS: gl.constexpr,
    FORMAT: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """`[16 warps, COLUMNS]`: what the tile of each warp gives for the rows of x."""
    WARPS: gl.constexpr = gl.num_warps()
    _, g, c = places_of_lanes(WARPS)
    words = read_tile(at, g, c, 0, GROUPS, FORMAT)
    slabs = gl.allocate_shared_memory(
        gl.bfloat16, [12, COLUMNS, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    for i in gl.static_range(2):
        copy_rows(x_ptr, rows, there, i, steps, slabs, i, WIDTH)
    nothing = (at[0].to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    SUMS: gl.constexpr = sums_layout(WARPS, COLUMNS)
    totals = gl.zeros([16 * WARPS, COLUMNS], gl.float32, SUMS)
    L: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    before = gl.zeros([16 * WARPS, 64], gl.bfloat16, L)
    for step in range(0, steps):
        async_copy.wait_group(1)
        barrier()  # all have the step's activations
        stage = step % 3
        ahead = read_tile(at, g, c, gl.minimum(step + 1, steps - 1), GROUPS, FORMAT)
        for q in gl.static_range(4):
            w = left_operand(words, c, nothing, q, COLUMNS, FORMAT)
            x = slabs.index(stage * 4 + q).permute([1, 0])
            totals = warpgroup_mma(w, x, totals, is_async=True)
            # an operand in registers is in use until its product is done
            totals, before = warpgroup_mma_wait(1, deps=[totals, before])
            before = w
        # where the step before had its own: all warps have done with those
        to = (step + 2) % 3
        copy_rows(x_ptr, rows, there, step + 2, steps, slabs, to, WIDTH)
        words = ahead
    totals, before = warpgroup_mma_wait(0, deps=[totals, before])
    async_copy.wait_group(0)  # others may take the memory of the slabs
    return totals


@gluon_jit
def in_order(totals, PARTS: gl.constexpr, FORMAT: gl.constexpr):
    """`[rows, COLUMNS, PARTS]` of sums whose warps have the tiles of each part."""
    WARPS: gl.constexpr = gl.num_warps() // PARTS
    COLUMNS: gl.constexpr = totals.shape[1]
    if is_by_rows(FORMAT):
        apart = gl.reshape(totals, [PARTS, 16 * WARPS, COLUMNS])
        y = gl.permute(apart, [1, 2, 0])
    else:  # rows 2 g and 2 g + 1 of a tile are 8 apart
        apart = gl.reshape(totals, [PARTS, WARPS, 2, 8, COLUMNS])
        beside = gl.permute(apart, [1, 3, 2, 4, 0])
        y = gl.reshape(beside, [16 * WARPS, COLUMNS, PARTS])
    return gl.convert_layout(y, results_layout(gl.num_warps(), PARTS))


@gluon_jit
def tile_of_table(table_ptr, entry):
    """Its expert, its first row, how many rows are there."""
    expert = gl.load(table_ptr + 4 * entry)
    first = gl.load(table_ptr + 4 * entry + 1)
    return expert, first, gl.load(table_ptr + 4 * entry + 3) - first


@gluon_jit
def rows_to_copy(
    order_ptr,
    first,
    left,
    TOP_K: gl.constexpr,
    WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Where the rows of x of a tile begin, and which there are, `[COLUMNS, 1]`."""
    L: gl.constexpr = copies_layout(gl.num_warps())
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, L))
    slot = gl.load(order_ptr + first + row, row < left, 0)
    rows = (slot // TOP_K).to(gl.int64) * WIDTH
    return rows[:, None], (row < left)[:, None]


@gluon_jit
def places_of_results(y, order_ptr, first, left, block):
    """Row of the weights and slot of each number `[rows, COLUMNS]`, and which are."""
    LAYOUT: gl.constexpr = y.type.layout  # else Triton 3.6 takes it for a number
    column = gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    slot = gl.load(order_ptr + first + column, column < left, 0)
    row = block * y.shape[0] + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    return row[:, None], slot[None, :], (column < left)[None, :]


@gluon_jit
def addresses_of_tile(pointers, expert, tile, HALF: gl.constexpr, SIZES: gl.constexpr):
    """Of the tile of each warp: its codes and, where they lie apart, its scales.

    Experts have SIZES: tiles of each half, halves, groups and words of a tile, format.
    """
    TILES: gl.constexpr = SIZES[0]
    HALVES: gl.constexpr = SIZES[1]
    GROUPS: gl.constexpr = SIZES[2]
    TILE_PAIRS: gl.constexpr = SIZES[3]
    FORMAT: gl.constexpr = SIZES[4]
    tile = gl.minimum(tile, TILES - 1) + HALF * TILES
    place = expert.to(gl.int64) * (HALVES * TILES) + tile
    codes = pointers[0].to(gl.pointer_type(gl.int64), bitcast=True)
    at = (codes + place * TILE_PAIRS,)
    if is_by_rows(FORMAT):
        at += (pointers[1] + place * (16 * GROUPS),)
    return at


@gluon_jit
def grouped_hidden_kernel(
    x_ptr,
    order_ptr,
    table_ptr,
    count_ptr,
    gate_ptr,
    gate_scales_ptr,
    up_ptr,
    up_scales_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    y_ptr,
    WIDTH: gl.constexpr,
    STEPS: gl.constexpr,
    GROUPS: gl.constexpr,
    TILES: gl.constexpr,
    TILE_PAIRS: gl.constexpr,
    FORMAT: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    HALVES: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """x `[tokens, WIDTH]` bfloat16 in the order of lanes; y `[slots, 16 TILES]`.

    gate and up `[EXPERTS, TILES, bytes]`; of two HALVES gate has those of up behind its
    own and up is None. Program `entry * BLOCKS + block` of the table's entries.
    """
    entry = gl.program_id(0) // BLOCKS
    if entry >= gl.load(count_ptr):
        return
    block = gl.program_id(0) % BLOCKS
    expert, first, left = tile_of_table(table_ptr, entry)
    known = expert < EXPERTS
    expert = gl.minimum(expert, EXPERTS - 1)
    EACH: gl.constexpr = gl.num_warps() // 2  # warps, so tiles, of gate and of up
    warp, _, _ = places_of_lanes(gl.num_warps())
    is_up = warp >= EACH
    tile = block * EACH + warp % EACH
    SIZES: gl.constexpr = (TILES, HALVES, GROUPS, TILE_PAIRS, FORMAT)
    gates = (gate_ptr, gate_scales_ptr)
    of_gate = addresses_of_tile(gates, expert, tile, 0, SIZES)
    if HALVES == 2:
        of_up = addresses_of_tile(gates, expert, tile, 1, SIZES)
    else:
        of_up = addresses_of_tile((up_ptr, up_scales_ptr), expert, tile, 0, SIZES)
    at = ()
    for i in gl.static_range(len(of_gate)):
        at += (gl.where(is_up, of_up[i], of_gate[i]),)
    rows, there = rows_to_copy(order_ptr, first, left, TOP_K, WIDTH, COLUMNS)
    steps = gl.where(known, STEPS, 0)
    totals = sums_of_tile(x_ptr, rows, there, at, steps, WIDTH, GROUPS, FORMAT, COLUMNS)
    gate, up = gl.split(in_order(totals, 2, FORMAT))
    row, slot, mask = places_of_results(gate, order_ptr, first, left, block)
    F: gl.constexpr = 16 * TILES
    mask = mask & (row < F)
    biased = (row < F) & known
    bias_at = expert.to(gl.int64) * (HALVES * F) + row
    gate = with_bias(gate, gate_bias_ptr, bias_at, biased)
    if HALVES == 2:
        up = with_bias(up, gate_bias_ptr, bias_at + F, biased)
    else:
        up = with_bias(up, up_bias_ptr, bias_at, biased)
    y = gl.where(known, gated(gate, up, ALPHA, LIMIT, UP_OFFSET), 0.0)
    to = y_ptr + slot.to(gl.int64) * F + row
    gl.store(to, y.to(y_ptr.dtype.element_ty), mask)


@gluon_jit
def grouped_result_kernel(
    x_ptr,
    order_ptr,
    table_ptr,
    count_ptr,
    down_ptr,
    down_scales_ptr,
    bias_ptr,
    y_ptr,
    WIDTH: gl.constexpr,
    STEPS: gl.constexpr,
    GROUPS: gl.constexpr,
    TILES: gl.constexpr,
    TILE_PAIRS: gl.constexpr,
    FORMAT: gl.constexpr,
    EXPERTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """x `[slots, WIDTH]` bfloat16 in the order of lanes; y `[slots, 16 TILES]`.

    With the bias of its expert; zeros for slots that have none.
    """
    entry = gl.program_id(0) // BLOCKS
    if entry >= gl.load(count_ptr):
        return
    block = gl.program_id(0) % BLOCKS
    expert, first, left = tile_of_table(table_ptr, entry)
    known = expert < EXPERTS
    expert = gl.minimum(expert, EXPERTS - 1)
    warp, _, _ = places_of_lanes(gl.num_warps())
    at = addresses_of_tile(
        *((down_ptr, down_scales_ptr), expert, block * gl.num_warps() + warp),
        *(0, (TILES, 1, GROUPS, TILE_PAIRS, FORMAT)),
    )
    rows, there = rows_to_copy(order_ptr, first, left, 1, WIDTH, COLUMNS)
    steps = gl.where(known, STEPS, 0)
    totals = sums_of_tile(x_ptr, rows, there, at, steps, WIDTH, GROUPS, FORMAT, COLUMNS)
    y = gl.sum(in_order(totals, 1, FORMAT), 2)
    row, slot, mask = places_of_results(y, order_ptr, first, left, block)
    F: gl.constexpr = 16 * TILES
    y = with_bias(y, bias_ptr, expert.to(gl.int64) * F + row, (row < F) & known)
    to = y_ptr + slot.to(gl.int64) * F + row
    gl.store(to, y.to(y_ptr.dtype.element_ty), mask & (row < F))
