"""The kernel of products of packed rows with up to 64 activations, for Hopper.

    y = x w^T

Both weights and activations come by bulk copies, steps of 256 columns ahead: what
comes from the L2 cache seems to queue behind what comes from memory, so neither is
asked for later than the other. Weights are decoded in registers and are the left
operand of the matrix units, see `warpgroup_products.py`.

The warps of a program are GROUPS, each of which takes steps of its own and has a tile
of 16 rows for each of its warps: so a program adds up the columns of few rows by
itself. Only the warps of a group wait for each other, once a step.

A weight is scale * (code - zero) + offset. The scale is a sum of two bfloat16, so that
only the offset and the result are rounded; where a bfloat16 is the scale, one is exact.
"""

from jaxkern.gpu.bulk_ring import (
    ask,
    begin_ring,
    has_come,
    own_memory,
    shared_word,
)
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.fixed_point_codes import bytes_of_step
from jaxkern.triton.quant.fixed_point_kernel import places_of_lanes
from jaxkern.triton.quant.fragments import barrier
from jaxkern.triton.quant.product_kernel import (
    begin_early,
    put,
    use_shared,
    wait_for_those_ahead,
)
from jaxkern.triton.quant.shared_codes import read_shared
from jaxkern.triton.quant.warpgroup_products import (
    awaited,
    described,
    multiplied,
    nothing_yet,
    pitch_of_sums,
    put_totals,
    weights_of_columns,
)

BARS = 128  # bytes of what the steps of activations are waited for at


@constexpr_function
def bytes_of_bars():
    return BARS


@constexpr_function
def bytes_of_memory(FORMAT, N, WARPS, GROUPS, X_DEPTH, W_DEPTH):
    """Of a program: bars, activations, and of each warp a ring of weights.

    The sums lie where the activations were.
    """
    rings = WARPS * W_DEPTH * (bytes_of_step(FORMAT) + 8)
    return place_of_rings(N, WARPS, GROUPS, X_DEPTH) + rings


@constexpr_function
def place_of_rings(N, WARPS, GROUPS, X_DEPTH):
    sums = GROUPS * N * pitch_of_sums(WARPS // GROUPS)
    return BARS + max(512 * N * X_DEPTH * GROUPS, sums)


@constexpr_function
def group_barrier_text(THREADS):
    return f"bar.sync $1, {THREADS}; mov.b32 $0, $1;"


@gluon_jit
def barrier_of_group(group, GROUPS: gl.constexpr):
    """Returns when all warps of the group are here."""
    if GROUPS == 1:
        barrier()
    else:
        gl.inline_asm_elementwise(
            group_barrier_text(32 * gl.num_warps() // GROUPS),
            "=r,r",
            [group + 1],
            gl.int32,
            False,
            1,
        )


@constexpr_function
def power_above(N):
    return 1 << (N - 1).bit_length()


@gluon_jit
def ask_for_all(
    rings,
    asks,
    count,
    BYTES: gl.constexpr,
    NEXT: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """Asks for the first DEPTH steps of `count`, NEXT bytes apart."""
    bars, places, source = rings
    for i in gl.static_range(DEPTH):
        some = asks * (i < count).to(gl.int32)
        ask(bars + 8 * i, places + BYTES * i, source + NEXT * i, BYTES, some)


@gluon_jit
def staged_activations_kernel(
    x_ptr,
    tiles_ptr,
    residual_ptr,
    y_ptr,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    TILES: gl.constexpr,
    FORMAT: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    GROUPS: gl.constexpr,
    X_DEPTH: gl.constexpr,
    W_DEPTH: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[BLOCKS, K / 8, COLUMNS, 8]` bfloat16, tiles_ptr `[TILES, 16 row_bytes]`.

    x is in the order of `in_order_of_steps`. A program has a tile of each warp of a
    group and one of BLOCKS of COLUMNS activations. Where the second axis has several
    programs, each has STEPS steps of the columns, which GROUPS divides, and y is
    `[programs, ROWS, 16 TILES]`, the sums of each. X_DEPTH steps of activations have
    memory, 2 or more, of one group 3 or more, and W_DEPTH of weights, 2 or more.
    """
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = bytes_of_step(FORMAT)
    X_BYTES: gl.constexpr = 512 * COLUMNS
    warp, g, c = places_of_lanes(WARPS)
    leads = (g + c == 0).to(gl.int32)
    WIDTH: gl.constexpr = WARPS // GROUPS
    group = warp // WIDTH
    first_of_group = leads * (warp % WIDTH == 0).to(gl.int32)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    first_tile = gl.program_id(0) // BLOCKS * WIDTH
    block = gl.program_id(0) % BLOCKS
    tile = gl.minimum(first_tile + warp % WIDTH, TILES - 1)
    first = gl.program_id(1) * STEPS
    count = gl.minimum(STEPS, K // 256 - first) // GROUPS
    own = own_memory(leads, RING)
    x_bars = own + group * (8 * X_DEPTH)
    x_places = own + bytes_of_bars() + group * (X_BYTES * X_DEPTH)
    RINGS: gl.constexpr = place_of_rings(COLUMNS, WARPS, GROUPS, X_DEPTH)
    bars = own + RINGS + warp * (8 * W_DEPTH)
    places = own + (RINGS + WARPS * W_DEPTH * 8) + warp * (W_DEPTH * BYTES)
    tiles_at = tiles_ptr.to(gl.int64)
    source = tiles_at + (tile.to(gl.int64) * (K // 256) + first + group) * BYTES
    x_source = x_ptr.to(gl.int64) + (block * (K // 256) + first + group) * X_BYTES
    NEXT: gl.constexpr = GROUPS * BYTES
    X_NEXT: gl.constexpr = GROUPS * X_BYTES
    begin_ring(x_bars, first_of_group, X_DEPTH)
    begin_ring(bars, leads, W_DEPTH)
    rings = (bars, places, source)
    if AHEAD == 2:
        ask_for_all(rings, leads, count, BYTES, NEXT, W_DEPTH)
        wait_for_those_ahead()
    # before the weights, behind which they would queue
    x_rings = (x_bars, x_places, x_source)
    ask_for_all(x_rings, first_of_group, count, X_BYTES, X_NEXT, X_DEPTH)
    if AHEAD != 2:
        ask_for_all(rings, leads, count, BYTES, NEXT, W_DEPTH)
    nothing = (source >> 60).to(gl.int32) + c * 0  # of an address
    totals, before = nothing_yet(nothing, COLUMNS)
    # a group awaits its products of a step while others have theirs
    BACK: gl.constexpr = 1 if GROUPS > 1 else 2
    # never none: sums that came from two places would be awaited at every product
    for i in range(gl.maximum(count, 1)):
        # no warp has more than the last product of the step before
        barrier_of_group(group, GROUPS)
        # what all have read: weights of the step before, x of that or the one before
        later = i - 1 + W_DEPTH
        asks = leads * ((i > 0) & (later < count)).to(gl.int32)
        to = (i + W_DEPTH - 1) % W_DEPTH
        ask(bars + 8 * to, places + BYTES * to, source + later * NEXT, BYTES, asks)
        later = i - BACK + X_DEPTH
        asks = first_of_group * ((i >= BACK) & (later < count)).to(gl.int32)
        to = (i + X_DEPTH - BACK) % X_DEPTH
        at = x_places + X_BYTES * to
        ask(x_bars + 8 * to, at, x_source + later * X_NEXT, X_BYTES, asks)
        place = i % W_DEPTH
        has_come(bars + 8 * place, i // W_DEPTH % 2 + 0 * c)
        words = read_shared(places + BYTES * place, g, c, FORMAT)
        place = i % X_DEPTH
        has_come(x_bars + 8 * place, i // X_DEPTH % 2 + 0 * c)
        slab = described(x_places + X_BYTES * place, COLUMNS)
        for q in gl.static_range(4):
            w = weights_of_columns(words, c, nothing, q, FORMAT)
            totals = multiplied(w, slab + q * (8 * COLUMNS), totals, COLUMNS)
            totals, before = awaited(totals, before, 1, COLUMNS)
            before = w
        if GROUPS > 1:
            totals, before = awaited(totals, before, 0, COLUMNS)
    totals, before = awaited(totals, before, 0, COLUMNS)
    barrier()  # all have done with the activations
    SUMS: gl.constexpr = COLUMNS * pitch_of_sums(WIDTH)
    sums_at = own + bytes_of_bars() + group * SUMS
    put_totals(totals, sums_at, warp % WIDTH, g, c, COLUMNS, WIDTH)
    barrier()
    SIZE: gl.constexpr = power_above(16 * WIDTH * COLUMNS)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    flat = gl.arange(0, SIZE, FLAT)
    row = flat // (16 * WIDTH)
    weight = flat % (16 * WIDTH)
    inside = row < gl.minimum(COLUMNS, ROWS - block * COLUMNS)
    place = gl.where(inside, row * pitch_of_sums(WIDTH) + 4 * weight, 0)
    place = place + own_memory(flat, RING) + bytes_of_bars()
    y = shared_word(place, 0).to(gl.float32, bitcast=True)
    for other in gl.static_range(1, GROUPS):
        y += shared_word(place, other * SUMS).to(gl.float32, bitcast=True)
    column = first_tile * 16 + weight
    row += gl.program_id(1) * ROWS + block * COLUMNS
    there = inside & (column < 16 * TILES)
    put(y_ptr, residual_ptr, y, row * (16 * TILES) + column, there)
