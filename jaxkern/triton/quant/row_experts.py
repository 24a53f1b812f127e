"""Experts of row-major containers for a few tokens: two launches, each for all slots.

    hidden   gate and up of one slot, 16 rows of both; half of the warps each
    sum      16 rows of a token's result, over all its slots

Warps share the batches of columns of a row, `row_kernel.py`; in the sum those of all
slots, which are one long row whose columns are scaled by the weight of their expert.
Scales are of fewer columns than four lanes have: each lane has a sum of its own.
"""

from jaxkern.gpu.triton_call import gl, gluon_jit
from jaxkern.triton.quant.expert_rows import (
    expert_of_slot,
    gate_and_up,
    put_hidden,
    put_sum,
    slot_of_item,
)
from jaxkern.triton.quant.fragments import in_lanes, twice
from jaxkern.triton.quant.product_kernel import (
    begin_early,
    finished,
    lanes_of,
    place_in,
)
from jaxkern.triton.quant.row_codes import in_registers
from jaxkern.triton.quant.row_kernel import add_batch, read_batch, read_scales


@gluon_jit
def numbers_of_rows(nothing, P: gl.constexpr):
    """What unpacking needs in registers; `nothing` is a zero that no compiler sees."""
    FORMAT: gl.constexpr = P.format
    FACTOR: gl.constexpr = P.factor
    same = nothing + twice(FACTOR)
    numbers = in_registers(nothing, FORMAT)
    numbers += ((same, same, same, same),)
    return numbers


@gluon_jit
def row_hidden_kernel(
    x_ptr,
    ids_ptr,
    gate_ptr,
    gate_scales_ptr,
    up_ptr,
    up_scales_ptr,
    shared_ptr,
    shared_scales_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    zeros_ptr,
    y_ptr,
    P: gl.constexpr,
    HALVES: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[tokens, columns]` bfloat16; codes and scales of gate and up `[experts, ...]`.

    Of two HALVES gate has the rows of up behind its own and up is None. y
    `[tokens * top_k, rows]`, of program (16 rows, slot).
    """
    if AHEAD:
        begin_early(False)
    SHARES: gl.constexpr = P.shares
    WARPS: gl.constexpr = 2 * SHARES
    LANES: gl.constexpr = lanes_of(WARPS, 1)
    LANES3: gl.constexpr = gl.SliceLayout(3, LANES)
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES3)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES3)))[None, None, :]
    g = g + 0 * warp
    share = warp // 2
    slot = gl.program_id(1)
    expert, known, is_shared = expert_of_slot(ids_ptr, slot, P.experts)
    far = expert * (HALVES * P.rows * P.row_words)
    far_scales = expert * (HALVES * P.rows * P.groups)
    gate = gate_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + far
    gate_scales = gate_scales_ptr + far_scales
    if HALVES == 2:
        up = gate + P.rows * P.row_words
        up_scales = gate_scales + P.rows * P.groups
    else:
        up = up_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + far
        up_scales = up_scales_ptr + far_scales
    if shared_ptr is not None:
        both = shared_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        gate = gl.where(is_shared, both, gate)
        up = gl.where(is_shared, both + P.rows * P.row_words, up)
        gate_scales = gl.where(is_shared, shared_scales_ptr, gate_scales)
        of_up = shared_scales_ptr + P.rows * P.groups
        up_scales = gl.where(is_shared, of_up, up_scales)
    is_gate = warp % 2 == 0
    words_ptr = gl.where(is_gate, gate, up)
    scales_ptr = gl.where(is_gate, gate_scales, up_scales)
    row = gl.minimum(gl.program_id(0) * 16 + g, P.rows - 1)
    below = gl.minimum(gl.program_id(0) * 16 + g + 8, P.rows - 1)
    rows = (words_ptr + row * P.row_words, words_ptr + below * P.row_words)
    scale_rows = (row * P.groups, below * P.groups)
    x_at = x_ptr + slot // P.top_k * P.columns
    zeros_at = zeros_ptr.to(gl.int64)  # read in place of what is not there
    zeros = gl.full([WARPS, 8, 4, 1], 0.0, gl.float32, LANES)
    totals = (zeros, zeros, zeros, zeros)
    nothing = (rows[0].to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    numbers = numbers_of_rows(nothing, P)
    n = in_lanes(g)
    batch = share
    words = read_batch(rows, c, batch, P)
    scales = read_scales(scales_ptr, scale_rows, c, batch, P)
    for turn in range(P.turns - 1):
        batch = turn * SHARES + share
        next_words = read_batch(rows, c, batch + SHARES, P)
        next_scales = read_scales(scales_ptr, scale_rows, c, batch + SHARES, P)
        totals = add_batch(
            words, numbers, scales, (), x_at, zeros_at, n, c, batch, totals, P
        )
        words = next_words
        scales = next_scales
    batch = (P.turns - 1) * SHARES + share
    totals = add_batch(
        words, numbers, scales, (), x_at, zeros_at, n, c, batch, totals, P
    )
    for i in gl.static_range(2):  # rows g and g + 8
        sums = gate_and_up(totals[2 * i] + totals[2 * i + 1], SHARES, 4)
        column = place_in(sums[0], 2)
        row = gl.program_id(0) * 16 + place_in(sums[0], 1) + 8 * i + 0 * column
        here = (column == 0) & (row < P.rows)
        put_hidden(
            *(sums[0], sums[1], expert, known, is_shared, slot, row, here),
            (gate_bias_ptr, up_bias_ptr, shared_ptr, y_ptr),
            *(P.rows, HALVES, ALPHA, LIMIT, UP_OFFSET),
        )


@gluon_jit
def item_of_rows(item, token, experts, of_all, row, below, c, P: gl.constexpr):
    """Slot, batch, weight and whether it counts, the words and scales of an item.

    `experts` are pointers to ids, weights, codes and scales, `of_all` those of the
    shared one.
    """
    ids_ptr, weights_ptr, codes_ptr, scales_ptr = experts
    shared_ptr, shared_scales_ptr = of_all
    slot, batch, expert, is_shared, weight, named = slot_of_item(
        *(item, token, ids_ptr, weights_ptr, shared_ptr, P.turns, P.top_k, P.experts)
    )
    words_ptr = codes_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    words_ptr = words_ptr + expert * (P.rows * P.row_words)
    scales_ptr = scales_ptr + expert * (P.rows * P.groups)
    if shared_ptr is not None:
        shared = shared_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        words_ptr = gl.where(is_shared, shared, words_ptr)
        scales_ptr = gl.where(is_shared, shared_scales_ptr, scales_ptr)
    rows = (words_ptr + row * P.row_words, words_ptr + below * P.row_words)
    words = read_batch(rows, c, batch, P)
    scale_rows = (row * P.groups, below * P.groups)
    scales = read_scales(scales_ptr, scale_rows, c, batch, P)
    nothing = (rows[0].to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    return slot, batch, weight, named, words, scales, nothing


@gluon_jit
def row_sum_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    down_ptr,
    down_scales_ptr,
    shared_ptr,
    shared_scales_ptr,
    bias_ptr,
    residual_ptr,
    zeros_ptr,
    y_ptr,
    P: gl.constexpr,
    SHARES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[tokens * top_k, columns]` bfloat16; codes, scales of down `[experts, ...]`.

    y `[tokens, rows]`, of program (16 rows, token). P is that of one warp.
    """
    if AHEAD:
        begin_early(False)
    LANES: gl.constexpr = lanes_of(SHARES, 1)
    LANES3: gl.constexpr = gl.SliceLayout(3, LANES)
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES3)
    share = gl.arange(0, SHARES, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES3)))[None, None, :]
    g = g + 0 * share
    token = gl.program_id(1)
    row = gl.minimum(gl.program_id(0) * 16 + g, P.rows - 1)
    below = gl.minimum(gl.program_id(0) * 16 + g + 8, P.rows - 1)
    zeros_at = zeros_ptr.to(gl.int64)  # read in place of what is not there
    zeros = gl.full([SHARES, 8, 4, 1], 0.0, gl.float32, LANES)
    first = zeros
    second = zeros
    n = in_lanes(g)
    TURNS: gl.constexpr = (P.top_k * P.turns + SHARES - 1) // SHARES
    experts = (ids_ptr, weights_ptr, down_ptr, down_scales_ptr)
    of_all = (shared_ptr, shared_scales_ptr)
    ahead = item_of_rows(share, token, experts, of_all, row, below, c, P)
    for turn in gl.static_range(TURNS):
        slot, batch, weight, named, words, scales, nothing = ahead
        if turn + 1 < TURNS:
            item = (turn + 1) * SHARES + share
            ahead = item_of_rows(item, token, experts, of_all, row, below, c, P)
        x_at = x_ptr + in_lanes(slot * P.columns + c * 0)
        sums = (zeros, zeros, zeros, zeros)
        numbers = numbers_of_rows(nothing, P)
        sums = add_batch(
            words, numbers, scales, (), x_at, zeros_at, n, c, batch, sums, P
        )
        here = in_lanes(named)
        factor = in_lanes(weight)
        first += gl.where(here, factor * (sums[0] + sums[1]), 0.0)
        second += gl.where(here, factor * (sums[2] + sums[3]), 0.0)
    totals = (first, second)
    for i in gl.static_range(2):  # rows g and g + 8
        y = finished(totals[i], 1, SHARES, False, 4)
        column = place_in(y, 2)
        row = gl.program_id(0) * 16 + place_in(y, 1) + 8 * i + 0 * column
        put_sum(
            *(y, token, row, (column == 0) & (row < P.rows)),
            (ids_ptr, weights_ptr, bias_ptr, residual_ptr, y_ptr),
            *(P.rows, P.top_k, P.experts),
        )
