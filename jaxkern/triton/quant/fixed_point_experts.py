"""Experts of interleaved rows for one token, by whole numbers: two launches.

    hidden   gate and up of a slot, 16 rows of both
    sum      16 rows of the result, over all slots, which are one long row

As in `fixed_point_kernel.py` activations are whole numbers and the weights come by bulk
copies, of which each warp has several on their way; programs walk over the tiles of all
slots. Which expert a slot has is read for each copy. In the sum the weight of an expert
is in the scale of what it multiplies. Columns may end within a step: its copy is
shorter, and what stands behind it in the ring is multiplied by zero.
"""

from jaxkern.gpu.bulk_ring import (
    all_have_read,
    ask_up_to,
    begin_ring,
    has_come,
    own_memory,
)
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.expert_rows import expert_of_slot, gated, with_bias
from jaxkern.triton.quant.fixed_point_codes import (
    add_lane,
    group_of,
    read_lane,
    step_of_sums,
    step_of_x,
)
from jaxkern.triton.quant.fixed_point_kernel import (
    places_of_lanes,
    put_sums,
    sum_of_warps,
)
from jaxkern.triton.quant.fixed_point_x import (
    clear,
    columns_in_memory,
    columns_of,
    in_words,
    put_digits,
    put_groups,
    read_columns,
)
from jaxkern.triton.quant.fragments import barrier
from jaxkern.triton.quant.product_kernel import (
    let_next_begin,
    use_shared,
    wait_for_those_ahead,
)


@constexpr_function
def of_lane_text():
    return "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"


@gluon_jit
def of_lane(number, lane):
    """What another lane of the warp has."""
    return gl.inline_asm_elementwise(
        of_lane_text(), "=r,r,r", [number, lane], gl.int32, False, 1
    )


@gluon_jit
def ids_of_lanes(ids_ptr, lanes, P: gl.constexpr):
    """The id of slot i in lane i, from beyond the first cache."""
    _, g, c = lanes
    slot = gl.minimum(4 * g + c, P.slots - 1)
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];",
        "=r,l",
        [ids_ptr.to(gl.int64) + 4 * slot],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def is_named(expert, shared_ptr, P: gl.constexpr):
    """Whether an id is that of an expert, or of the shared one."""
    if shared_ptr is None:
        return (expert >= 0) & (expert < P.experts)
    else:
        return (expert >= 0) & (expert <= P.experts)


@gluon_jit
def source_of_step(s, experts, P: gl.constexpr):
    """Where step s of all that a program reads lies; its bytes, 0 where there is none.

    `experts` are ids of lanes, pointers to gate or down, to up, to the shared expert.
    """
    ids, tiles_ptr, up_ptr, shared_ptr = experts
    row = s // P.row_steps
    within = s % P.row_steps
    item = gl.program_id(0) + row // P.parts * P.programs
    part = row % P.parts
    if P.halves > 0:
        slot = item // P.tiles
        tile = item % P.tiles
    else:
        slot = within // P.steps
        tile = item
    slot = gl.minimum(slot, P.slots - 1)
    id = of_lane(ids, slot)
    expert = id.to(gl.int64)
    at = tiles_ptr.to(gl.int64)
    if P.halves == 2:
        expert = expert * 2 + part
    elif P.halves == 1:
        at = gl.where(part == 0, at, up_ptr.to(gl.int64))
    if shared_ptr is not None:
        at = gl.where(id == P.experts, shared_ptr.to(gl.int64), at)
        expert = gl.where(id == P.experts, part.to(gl.int64), expert)
    step = within % P.steps
    at = at + (expert * P.tiles + tile) * P.tile_bytes + step * P.step_bytes
    count = gl.where(step == P.steps - 1, P.last_bytes, P.step_bytes)
    return at, gl.where(is_named(id, shared_ptr, P), count, 0)


@gluon_jit
def ask_for(s, all_steps, bar, place, leads, experts, P: gl.constexpr):
    """Has step s copied, if a program has as many."""
    source, count = source_of_step(s, experts, P)
    ask_up_to(bar, place, source, count, leads * (s < all_steps).to(gl.int32))


@gluon_jit
def begin(P: gl.constexpr):
    """Makes ring and sums ready: lanes, the program's memory, the ring of each warp.

    Of that where it waits, where it has its steps, who leads it.
    """
    warp, g, c = places_of_lanes(P.warps)
    own = own_memory(warp, P.ring)
    leads = (g + c == 0).to(gl.int32)
    bars = own + (P.x_bytes + P.sum_bytes) + warp * (8 * P.depth)
    places = own + (P.x_bytes + P.sum_bytes + 8 * P.depth * P.warps)
    places = places + warp * (P.depth * P.step_bytes)
    begin_ring(bars, leads, P.depth)
    if P.row_steps < P.warps:  # a row has nothing for some warps
        clear(P.ring, P.x_bytes, P.sum_bytes)
    return (warp, g, c), own, (bars, places, leads)


@gluon_jit
def steps_of_program(P: gl.constexpr):
    mine = (P.items - gl.program_id(0) + P.programs - 1) // P.programs
    return mine * (P.parts * P.row_steps)


@gluon_jit
def ask_first(ring, lanes, experts, P: gl.constexpr):
    """The first steps of each warp."""
    bars, places, leads = ring
    all_steps = steps_of_program(P)
    DEPTH: gl.constexpr = P.depth
    for i in gl.static_range(DEPTH):
        s = i * P.warps + lanes[0]
        to = places + P.step_bytes * i
        ask_for(s, all_steps, bars + 8 * i, to, leads, experts, P)


@gluon_jit
def put_all_sums(own, ring, lanes, experts, P: gl.constexpr):
    """The sums of each warp and row of steps to shared memory."""
    FORMAT: gl.constexpr = P.format
    bars, places, leads = ring
    warp, g, c = lanes
    all_steps = steps_of_program(P)
    # lane (g, c) has column g of x, which is zero in the places of lanes but g / 2
    has_x = g // 2 == c
    x_at = gl.where(has_x, c * 32 + g % 2 * 16, P.x_bytes - step_of_x()) + own
    nothing = x_at >> 28  # of an address
    x_step = gl.where(has_x, step_of_x(), 0)
    LANE: gl.constexpr = 8 if FORMAT == "Q8_0" else 16
    kept_at = own + P.x_columns // 256 * step_of_x() + c * LANE
    sums_at = own + P.x_bytes + warp * 64 + g * 8
    t0 = (0 * warp).to(gl.float32)
    t1 = t0
    for turn in range(0, (all_steps + P.warps - 1) // P.warps):
        s = turn * P.warps + warp
        place = turn % P.depth
        bar = bars + 8 * place
        there = s < all_steps  # what is not asked for is not waited for
        has_come(bar, (turn // P.depth % 2) ^ gl.where(there, 0, 1))
        at = places + P.step_bytes * place
        words = read_lane(at, g, c, FORMAT)
        all_have_read(at)
        ask_for(s + P.depth * P.warps, all_steps, bar, at, leads, experts, P)
        within = s % P.row_steps
        x = x_at + within * x_step
        kept = kept_at + within * step_of_sums(FORMAT)
        n0, n1 = add_lane(words, c, x, kept, (t0, t1), nothing, FORMAT)
        if P.halves == 0:
            counts = is_named(of_lane(experts[0], within // P.steps), experts[3], P)
            n0 = gl.where(counts, n0, t0)
            n1 = gl.where(counts, n1, t1)
        row = s // P.row_steps
        ends = there & ((s + P.warps) // P.row_steps != row)
        to = sums_at + row * (P.warps * 64)
        t0, t1 = put_sums((n0, n1), ends.to(gl.int32), to)
    barrier()


@gluon_jit
def rows_of_items(P: gl.constexpr):
    """Item, row of its tile, address of its sums, and whether a program has it."""
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [P.warps], [0])
    row = gl.arange(0, P.together * 16, ROWS)
    item = gl.program_id(0) + row // 16 * P.programs
    at = own_memory(row, P.ring) + P.x_bytes
    at = at + row // 16 * (P.parts * P.warps * 64) + row % 16 * 4
    return item, row % 16, at, item < P.items


@gluon_jit
def fixed_point_hidden_kernel(
    x_ptr,
    ids_ptr,
    gate_ptr,
    up_ptr,
    shared_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    y_ptr,
    P: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    RING: gl.constexpr,
    LATE: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[columns]`, gate and up `[experts, tiles, bytes]`, y `[slots, 16 tiles]`.

    Of two halves gate has the tiles of up behind its own and up is None, as the shared
    expert has them.
    """
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    lanes, own, ring = begin(P)
    if AHEAD:
        if not LATE:
            let_next_begin()
        wait_for_those_ahead()
        if LATE:
            let_next_begin()
    FORMAT: gl.constexpr = P.format
    columns = read_columns(x_ptr, P.columns, P.x_columns, FORMAT)
    experts = (ids_of_lanes(ids_ptr, lanes, P), gate_ptr, up_ptr, shared_ptr)
    ask_first(ring, lanes, experts, P)
    item, row, at, here = rows_of_items(P)
    slot = gl.minimum(item // P.tiles, P.slots - 1)
    expert, known, _ = expert_of_slot(ids_ptr, slot, P.experts)
    HALVES: gl.constexpr = P.halves
    of_gate = expert * (HALVES * 16 * P.tiles) + item % P.tiles * 16 + row
    zero = (0 * row).to(gl.float32)
    gate = with_bias(zero, gate_bias_ptr, of_gate, known & here)
    if HALVES == 2:
        up = with_bias(zero, gate_bias_ptr, of_gate + 16 * P.tiles, known & here)
    else:
        up = with_bias(zero, up_bias_ptr, of_gate, known & here)
    put_digits(columns, None, P.columns, P.x_columns, 0.0, RING, FORMAT)
    put_all_sums(own, ring, lanes, experts, P)
    gate += sum_of_warps(at, P.warps)
    up += sum_of_warps(at + P.warps * 64, P.warps)
    y = gated(gate, up, ALPHA, LIMIT, UP_OFFSET)
    y = gl.where(is_named(gl.load(ids_ptr + slot), shared_ptr, P), y, 0.0)
    gl.store(y_ptr + item * 16 + row, y.to(y_ptr.dtype.element_ty), here)


@gluon_jit
def read_slots(x_ptr, weights_ptr, P: gl.constexpr):
    """x of all slots in chunks, [groups, words, 4], and the weights of their groups."""
    FORMAT: gl.constexpr = P.format
    GROUP: gl.constexpr = group_of(FORMAT)
    SLOT: gl.constexpr = 256 * P.steps
    CHUNK: gl.constexpr = P.chunk
    group, _, _ = columns_of(CHUNK, FORMAT)
    start, within = columns_in_memory(CHUNK, FORMAT)
    chunks = ()
    COLUMNS: gl.constexpr = P.x_columns
    for first in gl.static_range(0, COLUMNS, CHUNK):
        begins = start + first
        slot = begins // SLOT
        present = (slot < P.slots) & (begins - slot * SLOT < P.columns)
        at = begins - slot * (SLOT - P.columns)
        x = gl.load(x_ptr + at + within, present, 0.0)
        slot = (group * GROUP + first) // SLOT
        weight = gl.load(weights_ptr + slot, slot < P.slots, 0.0).to(gl.float32)
        chunks += ((in_words(x, FORMAT), weight),)
    return chunks


@gluon_jit
def fixed_point_sum_kernel(
    x_ptr,
    early_ids_ptr,
    weights_ptr,
    early_down_ptr,
    early_shared_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    P: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[slots, columns]`, down `[experts, tiles, bytes]`, shared 1 such.

    y `[16 tiles]`.
    """
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    lanes, own, ring = begin(P)
    if AHEAD:
        let_next_begin()
    if AHEAD == 3:
        ids = ids_of_lanes(early_ids_ptr, lanes, P)
        experts = (ids, early_down_ptr, None, early_shared_ptr)
        ask_first(ring, lanes, experts, P)
        wait_for_those_ahead()
        chunks = read_slots(x_ptr, weights_ptr, P)
    else:
        if AHEAD:
            wait_for_those_ahead()
        chunks = read_slots(x_ptr, weights_ptr, P)
        ids = ids_of_lanes(early_ids_ptr, lanes, P)
        experts = (ids, early_down_ptr, None, early_shared_ptr)
        ask_first(ring, lanes, experts, P)
    item, row, at, here = rows_of_items(P)
    out = item * 16 + row
    zero = (0 * row).to(gl.float32)
    added = (with_bias(zero, residual_ptr, out, here),)
    SLOTS: gl.constexpr = P.slots
    if bias_ptr is not None:
        for i in gl.static_range(SLOTS):
            expert, known, _ = expert_of_slot(early_ids_ptr, i, P.experts)
            of_row = expert * (16 * P.tiles) + out
            added += (with_bias(zero, bias_ptr, of_row, here & known),)
    FORMAT: gl.constexpr = P.format
    CHUNK: gl.constexpr = P.chunk
    for i in gl.static_range(len(chunks)):
        x, weight = chunks[i]
        x = x.to(gl.float32)
        put_groups(x, weight, CHUNK * i, CHUNK, P.x_columns, RING, FORMAT)
    clear(RING, P.x_bytes - step_of_x(), step_of_x())
    put_all_sums(own, ring, lanes, experts, P)
    y = sum_of_warps(at, P.warps)
    for i in gl.static_range(len(added) - 1):
        y += gl.load(weights_ptr + i).to(gl.float32) * added[1 + i]
    y += added[0]
    gl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), here)
