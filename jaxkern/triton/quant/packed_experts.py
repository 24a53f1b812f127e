"""Experts of interleaved rows for a few tokens: two launches, each for all slots.

    hidden   gate and up of one slot, a tile of 16 rows of both; half of the warps each
    sum      a tile of 16 rows of a token's result, over all its slots

Warps share the steps of 256 columns. In the sum they share those of all slots, which
are one long row: its columns are scaled by the weight of their expert.
"""

from jaxkern.gpu.triton_call import gl, gluon_jit
from jaxkern.triton.quant.block_codes import read_step
from jaxkern.triton.quant.expert_rows import (
    expert_of_slot,
    gate_and_up,
    put_hidden,
    put_sum,
    slot_of_item,
)
from jaxkern.triton.quant.fragments import in_lanes
from jaxkern.triton.quant.product_kernel import (
    add_step,
    begin_early,
    finished,
    lanes_of,
    place_in,
    source_of,
    x_of_step,
)


@gluon_jit
def packed_hidden_kernel(
    x_ptr,
    ids_ptr,
    gate_ptr,
    up_ptr,
    shared_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    y_ptr,
    K: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    TILES: gl.constexpr,
    TILE_PAIRS: gl.constexpr,
    FORMAT: gl.constexpr,
    SHARES: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    HALVES: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[tokens, K]` bfloat16; gate and up `[EXPERTS, TILES, bytes]`, shared 2 tiles.

    Of two HALVES gate has those of up behind its own and up is None. y
    `[tokens * TOP_K, 16 TILES]`, of program (tile, slot).
    """
    if AHEAD:
        begin_early(False)
    WARPS: gl.constexpr = 2 * SHARES
    LANES: gl.constexpr = lanes_of(WARPS, 1)
    LANES3: gl.constexpr = gl.SliceLayout(3, LANES)
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES3)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES3)))[None, None, :]
    share = warp // 2
    tile = gl.program_id(0)
    slot = gl.program_id(1)
    expert, known, is_shared = expert_of_slot(ids_ptr, slot, EXPERTS)
    far = expert * (HALVES * TILES * TILE_PAIRS)
    gate = gate_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + far
    if HALVES == 2:
        up = gate + TILES * TILE_PAIRS
    else:
        up = up_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + far
    if shared_ptr is not None:
        both = shared_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
        gate = gl.where(is_shared, both, gate)
        up = gl.where(is_shared, both + TILES * TILE_PAIRS, up)
    at = gl.where(warp % 2 == 0, gate, up) + tile * TILE_PAIRS
    STEPS: gl.constexpr = (K + 255) // 256
    TURNS: gl.constexpr = (STEPS + SHARES - 1) // SHARES
    words = read_step(at, g, c, share, NUM_BLOCKS, FORMAT)
    zeros = gl.full([WARPS, 8, 4, 1], 0.0, gl.float32, LANES)
    totals = (zeros, zeros, zeros, zeros)
    n = in_lanes(g)
    present = n == 0
    x64 = (x_ptr + slot // TOP_K * K).to(gl.pointer_type(gl.int64), bitcast=True)
    x_at = x64 + n * (K // 4) + in_lanes(c)
    nothing = (at.to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    FROM: gl.constexpr = source_of(False, K % (256 * SHARES), 1)
    for turn in range(TURNS - 1):
        step = turn * SHARES + share
        ahead = read_step(at, g, c, step + SHARES, NUM_BLOCKS, FORMAT)
        x = x_of_step(x_at, present, step, c, K // 4, FROM)
        totals = add_step(words, c, x, totals, nothing, FORMAT, FROM, True)
        words = ahead
    step = (TURNS - 1) * SHARES + share
    x = x_of_step(x_at, present, step, c, K // 4, FROM)
    totals = add_step(words, c, x, totals, nothing, FORMAT, FROM, True)
    for i in gl.static_range(2):  # rows 2 g and 2 g + 1
        sums = gate_and_up(totals[2 * i], SHARES, 1)
        column = place_in(sums[0], 2)
        row = tile * 16 + 2 * place_in(sums[0], 1) + i + 0 * column
        put_hidden(
            *(sums[0], sums[1], expert, known, is_shared, slot, row, column == 0),
            (gate_bias_ptr, up_bias_ptr, shared_ptr, y_ptr),
            *(16 * TILES, HALVES, ALPHA, LIMIT, UP_OFFSET),
        )


@gluon_jit
def item_of_tiles(
    item, token, pointers, g, c, SIZES: gl.constexpr, FORMAT: gl.constexpr
):
    """Slot, step, weight and whether it counts, and the words of an item.

    `pointers` to ids, weights, tiles of the experts and of the shared one.
    """
    STEPS: gl.constexpr = SIZES[0]
    TOP_K: gl.constexpr = SIZES[1]
    EXPERTS: gl.constexpr = SIZES[2]
    TILE_PAIRS: gl.constexpr = SIZES[4]
    ids_ptr, weights_ptr, tiles_ptr, shared_ptr = pointers
    slot, step, expert, is_shared, weight, named = slot_of_item(
        *(item, token, ids_ptr, weights_ptr, shared_ptr, STEPS, TOP_K, EXPERTS)
    )
    tiles = tiles_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    tiles = tiles + expert * (SIZES[3] * TILE_PAIRS)
    if shared_ptr is not None:
        shared = shared_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
        tiles = gl.where(is_shared, shared, tiles)
    at = tiles + gl.program_id(0) * TILE_PAIRS
    words = read_step(at, g, c, step, SIZES[5], FORMAT)
    nothing = (at.to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    return slot, step, weight, named, words, nothing


@gluon_jit
def packed_sum_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    down_ptr,
    shared_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    K: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    TILES: gl.constexpr,
    TILE_PAIRS: gl.constexpr,
    FORMAT: gl.constexpr,
    SHARES: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[tokens * TOP_K, K]` bfloat16; down `[EXPERTS, TILES, bytes]`, shared 1 such.

    y `[tokens, 16 TILES]`, of program (tile, token).
    """
    if AHEAD:
        begin_early(False)
    LANES: gl.constexpr = lanes_of(SHARES, 1)
    LANES3: gl.constexpr = gl.SliceLayout(3, LANES)
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES3)
    share = gl.arange(0, SHARES, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES3)))[None, None, :]
    tile = gl.program_id(0)
    token = gl.program_id(1)
    x64 = x_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    STEPS: gl.constexpr = (K + 255) // 256
    TURNS: gl.constexpr = (TOP_K * STEPS + SHARES - 1) // SHARES
    FROM: gl.constexpr = source_of(False, K % 256, 1)
    n = in_lanes(g)
    present = n == 0
    zeros = gl.full([SHARES, 8, 4, 1], 0.0, gl.float32, LANES)
    first = zeros
    second = zeros
    pointers = (ids_ptr, weights_ptr, down_ptr, shared_ptr)
    SIZES: gl.constexpr = (STEPS, TOP_K, EXPERTS, TILES, TILE_PAIRS, NUM_BLOCKS)
    ahead = item_of_tiles(share, token, pointers, g, c, SIZES, FORMAT)
    for turn in gl.static_range(TURNS):
        slot, step, weight, named, words, nothing = ahead
        if turn + 1 < TURNS:
            item = (turn + 1) * SHARES + share
            ahead = item_of_tiles(item, token, pointers, g, c, SIZES, FORMAT)
        x_at = x64 + in_lanes(slot * (K // 4) + c) + n * 0
        x = x_of_step(x_at, present, step, c, K // 4, FROM)
        sums = (zeros, zeros, zeros, zeros)
        sums = add_step(words, c, x, sums, nothing, FORMAT, FROM, True)
        here = in_lanes(named)
        factor = in_lanes(weight)
        first += gl.where(here, factor * sums[0], 0.0)
        second += gl.where(here, factor * sums[2], 0.0)
    totals = (first, second)
    for i in gl.static_range(2):  # rows 2 g and 2 g + 1
        y = finished(totals[i], 1, SHARES, False, 1)
        column = place_in(y, 2)
        row = tile * 16 + 2 * place_in(y, 1) + i + 0 * column
        put_sum(
            *(y, token, row, column == 0),
            (ids_ptr, weights_ptr, bias_ptr, residual_ptr, y_ptr),
            *(16 * TILES, TOP_K, EXPERTS),
        )
