"""Experts of plain rows for one token: whole rows through a ring of bulk copies.

    hidden   act(gate[e] x, up[e] x): a warp takes a row of both, one after the other
    sum      16 rows of the result: of each slot some rows of its expert side by side

Weights are bfloat16, or bytes of e4m3 with a scale for each row. Each warp has rows on
their way that take no registers, so memory is asked for as much as it can bring, and
the sum asks for `down` before hidden is there (`bulk_ring.py`). Lanes read units of 8
or 16 bytes side by side; sums are of float32, and always in the same order.
"""

from jaxkern.gpu.bulk_ring import (
    all_have_read,
    ask_up_to,
    begin_ring,
    has_come,
    own_memory,
    shared_pair,
    shared_word,
)
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.expert_rows import gated
from jaxkern.triton.quant.fixed_point_experts import is_named, of_lane
from jaxkern.triton.quant.fixed_point_fours import four_of_e4m3
from jaxkern.triton.quant.fragments import barrier, rows_of
from jaxkern.triton.quant.one_activation import four_floats, store_word
from jaxkern.triton.quant.product_kernel import (
    let_next_begin,
    use_shared,
    wait_for_those_ahead,
)
from jaxkern.triton.quant.row_codes import read_x as four_of_memory
from jaxkern.triton.quant.whole_numbers import four_words


@gluon_jit
def lanes_of_warps(WARPS: gl.constexpr):
    """Warp and lane of every lane, [warps, 32]."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LANES))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, LANES))[None, :]
    return warp + 0 * lane, lane + 0 * warp


@gluon_jit
def id_of_slot(ids_ptr, slot):
    """From beyond the first cache."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];",
        "=r,l",
        [ids_ptr.to(gl.int64) + 4 * slot],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def floats_of_pair(word):
    """Two bfloat16."""
    low = (word << 16).to(gl.float32, bitcast=True)
    return low, (word & -65536).to(gl.float32, bitcast=True)


@gluon_jit
def floats_of_halves(word):
    """Two float16."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [word], (gl.int16, gl.int16), True, 1
    )
    low = low.to(gl.float16, bitcast=True).to(gl.float32)
    return low, high.to(gl.float16, bitcast=True).to(gl.float32)


@gluon_jit
def floats_of(words, P: gl.constexpr):
    """What words of weights are, in their order."""
    out = ()
    for i in gl.static_range(len(words)):
        if P.itemsize == 2:
            out += floats_of_pair(words[i])
        else:
            low, high = four_of_e4m3(words[i])
            out += floats_of_halves(low)
            out += floats_of_halves(high)
    return out


@gluon_jit
def unit_at(at, OFFSET: gl.constexpr, P: gl.constexpr):
    """The weights that a lane reads at once from shared memory."""
    if P.unit == 16:
        return floats_of(four_words(at, OFFSET), P)
    else:
        return floats_of(rows_of(shared_pair(at, OFFSET)), P)


@constexpr_function
def two_text(OFFSET):
    return f"ld.global.v2.b32 {{$0, $1}}, [$2+{OFFSET}];"


@gluon_jit
def two_of_memory(at, OFFSET: gl.constexpr):
    """Four columns of activations at an address."""
    return gl.inline_asm_elementwise(
        two_text(OFFSET), "=r,=r,l", [at], (gl.int32, gl.int32), False, 1
    )


@gluon_jit
def read_x(x_ptr, lane, P: gl.constexpr):
    """What a lane multiplies its units of a row with, words of two bfloat16."""
    BYTES: gl.constexpr = P.unit // P.itemsize * 2
    PARTS: gl.constexpr = BYTES // 16
    at = x_ptr.to(gl.int64) + lane * BYTES
    units = ()
    UNITS: gl.constexpr = P.units
    for i in gl.static_range(UNITS):
        words = ()
        if BYTES == 8:
            words += two_of_memory(at, 32 * BYTES * i)
        else:
            for j in gl.static_range(PARTS):
                words += four_of_memory(at, 32 * BYTES * i + 16 * j)
        units += (words,)
    return units


@gluon_jit
def begin_rows(warp, lane, P: gl.constexpr):
    """The program's memory and the ring of each warp: bars, places, who leads it."""
    own = own_memory(lane, P.ring)
    leads = (lane == 0).to(gl.int32)
    bars = own + P.more + warp * (8 * P.depth)
    places = own + (P.more + 8 * P.depth * P.warps)
    places = places + warp * (P.depth * P.step_bytes)
    begin_ring(bars, leads, P.depth)
    return own, (bars, places, leads)


@gluon_jit
def item_of(i, warp, P: gl.constexpr):
    """Item i of a warp, its slot and its row."""
    item = (i * P.warps + warp) * P.programs + gl.program_id(0)
    return item, gl.minimum(item // P.rows, P.slots - 1), item % P.rows


@gluon_jit
def ask_for_row(s, warp, ring, experts, P: gl.constexpr):
    """Has step s of a warp copied: of each item gate, then up."""
    bars, places, leads = ring
    ids, gate_ptr, up_ptr, shared_ptr = experts
    part = s % 2
    item, slot, row = item_of(s // 2, warp, P)
    id = of_lane(ids, slot)
    matrix = id.to(gl.int64)
    at = gate_ptr.to(gl.int64) + 0 * matrix
    if P.halves == 2:
        matrix = 2 * matrix + part
    else:
        at = gl.where(part + 0 * id == 0, at, up_ptr.to(gl.int64) + 0 * matrix)
    if shared_ptr is not None:
        of_all = id == P.experts
        at = gl.where(of_all, shared_ptr.to(gl.int64) + 0 * matrix, at)
        matrix = gl.where(of_all, (part + 0 * id).to(gl.int64), matrix)
    at = at + (matrix * P.rows + row) * P.step_bytes
    count = gl.where(is_named(id, shared_ptr, P), P.step_bytes, 0)
    asks = leads * (item < P.items).to(gl.int32)
    place = s % P.depth
    ask_up_to(bars + 8 * place, places + P.step_bytes * place, at, count, asks)


@gluon_jit
def scales_of_items(part, warp, lane, experts, scales, P: gl.constexpr):
    """The scale of the row that item i of a warp has, in lane i, as bits."""
    ids, _, _, shared_ptr = experts
    of_gate_ptr, of_up_ptr, of_all_ptr = scales
    item, slot, row = item_of(lane, warp, P)
    id = of_lane(ids, slot)
    matrix = gl.where((id >= 0) & (id < P.experts), id, 0).to(gl.int64)
    if P.halves == 2:
        at = of_gate_ptr + (2 * matrix + part) * P.rows + row
    elif part == 0:
        at = of_gate_ptr + matrix * P.rows + row
    else:
        at = of_up_ptr + matrix * P.rows + row
    if shared_ptr is not None:
        at = gl.where(id == P.experts, of_all_ptr + part * P.rows + row, at)
    there = (item < P.items) & is_named(id, shared_ptr, P)
    return gl.load(at, there, 0.0).to(gl.float32).to(gl.int32, bitcast=True)


@gluon_jit
def of_item(scales, i, lane):
    return of_lane(scales, 0 * lane + i).to(gl.float32, bitcast=True)


@gluon_jit
def sum_of_lanes(x):
    """[warps, 1]"""
    return gl.expand_dims(gl.sum(x, 1), 1)


@gluon_jit
def plain_hidden_kernel(
    x_ptr,
    ids_ptr,
    gate_ptr,
    gate_scales_ptr,
    up_ptr,
    up_scales_ptr,
    shared_ptr,
    shared_scales_ptr,
    y_ptr,
    P: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    RING: gl.constexpr,
    LATE: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[columns]`, gate and up `[experts, rows, columns]`, y `[slots, rows]`.

    Of two halves gate has the rows of up behind its own and up is None, as the shared
    expert has them.
    """
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    warp, lane = lanes_of_warps(P.warps)
    _, ring = begin_rows(warp, lane, P)
    if AHEAD:
        if not LATE:
            let_next_begin()
        wait_for_those_ahead()
        if LATE:
            let_next_begin()
    ids = id_of_slot(ids_ptr, gl.minimum(lane, P.slots - 1))
    experts = (ids, gate_ptr, up_ptr, shared_ptr)
    DEPTH: gl.constexpr = P.depth
    for first in gl.static_range(DEPTH):
        ask_for_row(first, warp, ring, experts, P)
    scales = (gate_scales_ptr, up_scales_ptr, shared_scales_ptr)
    if P.itemsize == 1:
        of_gate = scales_of_items(0, warp, lane, experts, scales, P)
        of_up = scales_of_items(1, warp, lane, experts, scales, P)
    x = read_x(x_ptr, lane, P)
    bars, places, _ = ring
    UNITS: gl.constexpr = P.units
    ALL_LANES: gl.constexpr = 32 * P.unit
    TURNS: gl.constexpr = P.turns
    for i in range(TURNS):
        item, slot, row = item_of(i, warp, P)
        there = item < P.items
        sums = ()
        for part in gl.static_range(2):
            s = 2 * i + part
            place = s % P.depth
            # what is not asked for is not waited for
            has_come(bars + 8 * place, (s // P.depth % 2) ^ gl.where(there, 0, 1))
            at = places + P.step_bytes * place + lane * P.unit
            even = (0 * lane).to(gl.float32)
            odd = even
            for u in gl.static_range(UNITS):
                w = unit_at(at, ALL_LANES * u, P)
                for j in gl.static_range(len(x[u])):
                    x0, x1 = floats_of_pair(x[u][j])
                    even = gl.fma(w[2 * j], x0, even)
                    odd = gl.fma(w[2 * j + 1], x1, odd)
            all_have_read(lane)
            ask_for_row(s + P.depth, warp, ring, experts, P)
            sums += (sum_of_lanes(even + odd) + (0 * lane).to(gl.float32),)
        gate, up = sums
        if P.itemsize == 1:
            gate = gate * of_item(of_gate, i, lane)
            up = up * of_item(of_up, i, lane)
        y = gated(gate, up, ALPHA, LIMIT, UP_OFFSET)
        y = gl.where(is_named(of_lane(ids, slot), shared_ptr, P), y, 0.0)
        out = y_ptr + slot * P.rows + row
        gl.store(out, y.to(y_ptr.dtype.element_ty), there & (lane == 0))


@gluon_jit
def ask_for_rows(s, all_steps, ring, experts, P: gl.constexpr):
    """Has step s of a program copied: some rows of a slot's expert."""
    bars, places, leads = ring
    ids, down_ptr, shared_ptr = experts
    tile = gl.program_id(0) + s // P.row_steps * P.programs
    within = s % P.row_steps
    id = of_lane(ids, within // P.parts)
    matrix = id.to(gl.int64)
    at = down_ptr.to(gl.int64) + 0 * matrix
    if shared_ptr is not None:
        of_all = id == P.experts
        at = gl.where(of_all, shared_ptr.to(gl.int64) + 0 * matrix, at)
        matrix = gl.where(of_all, 0, matrix)
    row = tile * 16 + within % P.parts * P.step_rows
    at = at + (matrix * P.rows + row) * P.row_bytes
    count = gl.where(is_named(id, shared_ptr, P), P.step_bytes, 0)
    asks = leads * (s < all_steps).to(gl.int32)
    place = s // P.warps % P.depth
    ask_up_to(bars + 8 * place, places + P.step_bytes * place, at, count, asks)


@gluon_jit
def ask_first_rows(warp, all_steps, ring, experts, P: gl.constexpr):
    DEPTH: gl.constexpr = P.depth
    for i in gl.static_range(DEPTH):
        ask_for_rows(i * P.warps + warp, all_steps, ring, experts, P)


@gluon_jit
def scales_of_rows(ids_ptr, out, here, scales, shared_ptr, P: gl.constexpr):
    """Of each slot what scales its sums, 0 where it has no expert."""
    of_rows_ptr, of_all_ptr = scales
    found = ()
    SLOTS: gl.constexpr = P.slots
    for j in gl.static_range(SLOTS):
        id = id_of_slot(ids_ptr, j + 0 * out)
        named = is_named(id, shared_ptr, P)
        if P.itemsize == 1:
            known = (id >= 0) & (id < P.experts)
            at = of_rows_ptr + gl.where(known, id, 0).to(gl.int64) * P.rows + out
            if shared_ptr is not None:
                at = gl.where(id == P.experts, of_all_ptr + out, at)
            scale = gl.load(at, here & named, 0.0).to(gl.float32)
        else:
            scale = gl.where(named, 1.0 + 0.0 * out.to(gl.float32), 0.0)
        found += ((named, scale),)
    return found


@gluon_jit
def put_weighed(x_ptr, weights_ptr, P: gl.constexpr):
    """Hidden of all slots times their weights, float32 in shared memory."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [P.warps], [0])
    CHUNK: gl.constexpr = 32 * P.warps
    place = gl.arange(0, CHUNK, FLAT)
    ALL: gl.constexpr = P.slots * P.columns
    chunks = ()
    for first in gl.static_range(0, ALL, CHUNK):
        at = gl.minimum(first + place, ALL - 1)
        x = gl.load(x_ptr + at).to(gl.float32)
        chunks += (x * gl.load(weights_ptr + at // P.columns).to(gl.float32),)
    own = own_memory(place, P.ring)
    for i in gl.static_range(len(chunks)):
        at = gl.minimum(CHUNK * i + place, ALL - 1)
        store_word(own + 4 * at, chunks[i].to(gl.int32, bitcast=True))
    barrier()


@gluon_jit
def plain_sum_kernel(
    x_ptr,
    early_ids_ptr,
    weights_ptr,
    early_down_ptr,
    early_scales_ptr,
    early_shared_ptr,
    early_shared_scales_ptr,
    residual_ptr,
    y_ptr,
    P: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[slots, columns]`, down `[experts, rows, columns]`, y `[rows]`."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    warp, lane = lanes_of_warps(P.warps)
    own, ring = begin_rows(warp, lane, P)
    if AHEAD:
        let_next_begin()
        if AHEAD != 3:
            wait_for_those_ahead()
    mine = (P.tiles - gl.program_id(0) + P.programs - 1) // P.programs
    all_steps = mine * P.row_steps
    ids = id_of_slot(early_ids_ptr, gl.minimum(lane, P.slots - 1))
    experts = (ids, early_down_ptr, early_shared_ptr)
    ask_first_rows(warp, all_steps, ring, experts, P)
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [P.warps], [0])
    number = gl.arange(0, P.together * 16, ROWS)
    tile = gl.program_id(0) + number // 16 * P.programs
    here = tile < P.tiles
    out = gl.where(here, tile * 16 + number % 16, 0)
    scales = (early_scales_ptr, early_shared_scales_ptr)
    scales = scales_of_rows(early_ids_ptr, out, here, scales, early_shared_ptr, P)
    if AHEAD == 3:
        wait_for_those_ahead()
    y = (0 * out).to(gl.float32)
    if residual_ptr is not None:
        y += gl.load(residual_ptr + out, here, 0.0).to(gl.float32)
    put_weighed(x_ptr, weights_ptr, P)
    put_sums_of_rows(warp, lane, own, all_steps, ring, experts, P)
    from_own = own_memory(number, P.ring) + P.x_bytes
    from_own = from_own + (number // 16 * (16 * P.slots) + number % 16) * 4
    SLOTS: gl.constexpr = P.slots
    for j in gl.static_range(SLOTS):
        named, scale = scales[j]
        total = shared_word(from_own, 64 * j).to(gl.float32, bitcast=True)
        y += gl.where(named, total, 0.0) * scale
    gl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), here)


@gluon_jit
def put_sums_of_rows(warp, lane, own, all_steps, ring, experts, P: gl.constexpr):
    """Of every step the sums of its rows, where its slot and its tile have them."""
    bars, places, _ = ring
    EACH: gl.constexpr = P.unit // P.itemsize  # elements of a unit
    FOURS: gl.constexpr = EACH // 4
    ROW: gl.constexpr = P.row_bytes
    ALL_LANES: gl.constexpr = 32 * P.unit
    UNITS: gl.constexpr = P.units
    STEP_ROWS: gl.constexpr = P.step_rows
    sums_at = own + P.x_bytes
    nowhere = sums_at + P.sum_bytes + 4 * lane
    for turn in range(0, (all_steps + P.warps - 1) // P.warps):
        s = turn * P.warps + warp
        there = s < all_steps
        place = turn % P.depth
        has_come(bars + 8 * place, (turn // P.depth % 2) ^ gl.where(there, 0, 1))
        at = places + P.step_bytes * place + lane * P.unit
        slot = s % P.row_steps // P.parts
        x_at = own + (slot * P.columns + lane * EACH) * 4
        zero = (0 * lane).to(gl.float32)
        totals = (zero,) * STEP_ROWS
        for u in gl.static_range(UNITS):
            x = ()
            for j in gl.static_range(FOURS):
                x += four_floats(x_at, (32 * EACH * u + 4 * j) * 4)
            more = ()
            for r in gl.static_range(STEP_ROWS):
                w = unit_at(at, ROW * r + ALL_LANES * u, P)
                total = totals[r]
                for j in gl.static_range(EACH):
                    total = gl.fma(w[j], x[j], total)
                more += (total,)
            totals = more
        all_have_read(lane)
        ask_for_rows(s + P.depth * P.warps, all_steps, ring, experts, P)
        put = zero
        for r in gl.static_range(STEP_ROWS):
            put = gl.where(lane == r, sum_of_lanes(totals[r]) + zero, put)
        to = gl.where(
            there & (lane < P.step_rows),
            sums_at + (s * P.step_rows + lane) * 4,
            nowhere,
        )
        store_word(to, put.to(gl.int32, bitcast=True))
    barrier()
