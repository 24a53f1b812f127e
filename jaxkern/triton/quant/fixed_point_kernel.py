"""The kernel of products of packed rows with one activation, by whole numbers.

    y = x w^T,  or  silu(x gate^T) * (x up^T);  x may be normalised, y added to another

x is taken in fixed point: of each group of columns that share a scale, a scale and
whole numbers of 16 bits, off by at most max |x| / 65024. Those are two digits of 8
bits, and the matrix instruction for whole numbers multiplies both at once with codes as
they are stored; nothing is rounded till the sums of a group are scaled in float32.

A program walks over tiles of 16 rows, so that it has x once. The weights come through
`bulk_ring.py`: each warp has several steps of 256 columns on their way, across tiles,
and the first of them before the kernel ahead has ended. No warp waits for another till
the sums of all tiles are added up.
"""

from jaxkern.gpu.bulk_ring import (
    all_have_read,
    ask,
    begin_ring,
    has_come,
    own_memory,
    shared_word,
)
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.fixed_point_codes import (
    add_lane,
    bytes_of_step,
    read_lane,
    step_of_sums,
    step_of_x,
)
from jaxkern.triton.quant.fixed_point_x import (
    bytes_of_x,
    clear,
    put_digits,
    read_columns,
)
from jaxkern.triton.quant.fragments import barrier
from jaxkern.triton.quant.product_kernel import (
    activated,
    begin_early,
    times,
    use_shared,
    wait_for_those_ahead,
)


@constexpr_function
def bytes_of_sums(UNITS, WARPS):
    """What the sums of 16 rows of each tile and warp take."""
    return UNITS * WARPS * 64


@gluon_jit
def source_of(tiles_at, s, PROGRAMS: gl.constexpr, SIZES: gl.constexpr):
    """The address of step s of all that a program reads."""
    STEPS: gl.constexpr = SIZES[0]  # of a tile
    EACH: gl.constexpr = SIZES[1]  # bytes of a step
    FAR: gl.constexpr = SIZES[2]  # tiles from gate to up, 0 without a gate
    unit = s // STEPS
    step = s % STEPS
    if FAR > 0:
        tile = gl.program_id(0) + unit // 2 * PROGRAMS + unit % 2 * FAR
    else:
        tile = gl.program_id(0) + unit * PROGRAMS
    return tiles_at + (tile.to(gl.int64) * STEPS + step) * EACH


@constexpr_function
def put_sums_text():
    four = "".join(
        f"shfl.sync.bfly.b32 other, {x}, {lane}, 0x1f, 0xffffffff;"
        f" add.f32 {x}, {x}, other; "
        for x in ("first", "second")
        for lane in (1, 2)
    )
    return f"""{{ .reg .pred goes_on; .reg .f32 first, second, other;
        mov.f32 first, $2; mov.f32 second, $3; setp.eq.s32 goes_on, $4, 0;
        @goes_on bra DONE; {four} st.shared.v2.f32 [$5], {{first, second}};
        mov.f32 first, 0f00000000; mov.f32 second, 0f00000000;
        DONE: mov.f32 $0, first; mov.f32 $1, second; }}"""


@gluon_jit
def put_sums(totals, ends, at):
    """Zeros where the tile of a warp ends, its sums of two rows by then in memory."""
    return gl.inline_asm_elementwise(
        put_sums_text(),
        "=f,=f,f,f,r,r",
        [totals[0], totals[1], ends, at],
        (gl.float32, gl.float32),
        False,
        1,
    )


@gluon_jit
def sum_of_warps(at, WARPS: gl.constexpr):
    """The sums of rows, each of which WARPS have put 64 bytes apart."""
    total = shared_word(at, 0).to(gl.float32, bitcast=True)
    for w in gl.static_range(1, WARPS):
        total += shared_word(at, 64 * w).to(gl.float32, bitcast=True)
    return total


@gluon_jit
def places_of_lanes(WARPS: gl.constexpr):
    """Warp, g and c of every lane, [warps, 8, 4]."""
    LANES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0]
    )
    OF_WARPS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LANES))
    warp = gl.arange(0, WARPS, OF_WARPS)[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    zero = 0 * warp + 0 * g + 0 * c
    return warp + zero, g + zero, c + zero


@gluon_jit
def fixed_point_kernel(
    x_ptr,
    norm_ptr,
    tiles_ptr,
    up_ptr,
    residual_ptr,
    y_ptr,
    K: gl.constexpr,
    TILES: gl.constexpr,
    FORMAT: gl.constexpr,
    EPS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PADDED: gl.constexpr,
    PROGRAMS: gl.constexpr,
    ROUND: gl.constexpr,
    DEPTH: gl.constexpr,
    FIRST: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[K]`, tiles_ptr `[TILES, 16 row_bytes]`, y `[16 TILES]`.

    K is a multiple of 256. Where GATED, up's TILES tiles stand behind those of gate.
    The warps of a program take the steps of all its tiles by turns, and have DEPTH of
    them on their way, FIRST before x. Each puts its sums of a tile into shared memory,
    where they are added up after ROUND tiles of the result.
    """
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    warp, g, c = places_of_lanes(WARPS)
    zero = 0 * warp
    leads = (g + c == 0).to(gl.int32)
    PARTS: gl.constexpr = 2 if GATED else 1
    EACH: gl.constexpr = bytes_of_step(FORMAT)
    OF_TILE: gl.constexpr = K // 256  # steps
    SIZES: gl.constexpr = (OF_TILE, EACH, TILES if GATED else 0)
    X_BYTES: gl.constexpr = bytes_of_x(PADDED, FORMAT)
    SUM_BYTES: gl.constexpr = bytes_of_sums(ROUND * PARTS, WARPS)
    # without a norm nothing else has memory declared
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    weight = None
    if norm_ptr is not None:  # before the weights, which would be in its way
        weight = read_columns(norm_ptr, K, PADDED, FORMAT)
    own = own_memory(leads, RING)
    sums = own + X_BYTES
    bars = sums + SUM_BYTES + warp * (8 * DEPTH)
    places = sums + (SUM_BYTES + 8 * DEPTH * WARPS) + warp * (DEPTH * EACH)
    tiles_at = tiles_ptr.to(gl.int64)
    mine = (TILES - gl.program_id(0) + PROGRAMS - 1) // PROGRAMS  # tiles of the result
    all_steps = mine * (PARTS * OF_TILE)
    begin_ring(bars, leads, DEPTH)
    for i in gl.static_range(FIRST):
        s = i * WARPS + warp
        source = source_of(tiles_at, s, PROGRAMS, SIZES)
        asks = leads * (s < all_steps).to(gl.int32)
        ask(bars + 8 * i, places + EACH * i, source, EACH, asks)
    if AHEAD == 2:
        wait_for_those_ahead()
    columns = read_columns(x_ptr, K, PADDED, FORMAT)
    for i in gl.static_range(FIRST, DEPTH):  # x does not wait for these
        s = i * WARPS + warp
        source = source_of(tiles_at, s, PROGRAMS, SIZES)
        asks = leads * (s < all_steps).to(gl.int32)
        ask(bars + 8 * i, places + EACH * i, source, EACH, asks)
    put_digits(columns, weight, K, PADDED, EPS, RING, FORMAT)
    # lane (g, c) has column g of x, which is zero in the places of lanes but g / 2
    has_x = g // 2 == c
    x_at = gl.where(has_x, c * 32 + g % 2 * 16, X_BYTES - step_of_x()) + own
    nothing = x_at >> 28  # of an address
    x_step = gl.where(has_x, step_of_x(), 0)
    LANE: gl.constexpr = 8 if FORMAT == "Q8_0" else 16
    kept_at = own + PADDED // 256 * step_of_x() + c * LANE
    t0 = zero.to(gl.float32)
    t1 = t0
    sums_at = sums + warp * 64 + g * 8
    if OF_TILE < WARPS:  # a tile has nothing for some warps
        clear(RING, X_BYTES, SUM_BYTES)
    for first in range(0, mine, ROUND):
        # of `first`, for Triton 3.6 carries no number through a loop of loops
        begun = (first * (PARTS * OF_TILE) + WARPS - 1) // WARPS
        last = gl.minimum((first + ROUND) * (PARTS * OF_TILE), all_steps)
        for turn in range(begun, (last + WARPS - 1) // WARPS):
            s = turn * WARPS + warp
            place = turn % DEPTH
            bar = bars + 8 * place
            there = s < all_steps  # what is not asked for is not waited for
            has_come(bar, (turn // DEPTH % 2) ^ gl.where(there, 0, 1))
            at = places + EACH * place
            words = read_lane(at, g, c, FORMAT)
            all_have_read(at)
            ahead = s + DEPTH * WARPS
            source = source_of(tiles_at, ahead, PROGRAMS, SIZES)
            ask(bar, at, source, EACH, leads * (ahead < all_steps).to(gl.int32))
            step = s % OF_TILE
            x = x_at + step * x_step
            kept = kept_at + step * step_of_sums(FORMAT)
            t0, t1 = add_lane(words, c, x, kept, (t0, t1), nothing, FORMAT)
            unit = s // OF_TILE
            ends = there & ((s + WARPS) // OF_TILE != unit)
            to = sums_at + (unit - first * PARTS) * (WARPS * 64)
            t0, t1 = put_sums((t0, t1), ends.to(gl.int32), to)
        barrier()
        ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        row = gl.arange(0, ROUND * 16, ROWS)
        unit = row // 16
        at = own_memory(row, RING) + X_BYTES
        at = at + unit * (PARTS * WARPS * 64) + row % 16 * 4
        y = sum_of_warps(at, WARPS)
        if GATED:
            y = activated(y, ACTIVATION) * sum_of_warps(at + WARPS * 64, WARPS)
        out = (gl.program_id(0) + (first + unit) * PROGRAMS) * 16 + row % 16
        here = first + unit < mine
        y = times(y, up_ptr, out, here, ACTIVATION)
        if residual_ptr is not None:
            y += gl.load(residual_ptr + out, here, 0.0).to(gl.float32)
        gl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), here)
        if first + ROUND < mine:
            barrier()
            if OF_TILE < WARPS:
                clear(RING, X_BYTES, SUM_BYTES)
