"""The kernel of products of packed rows with up to 32 activations, for Hopper.

    y = x w^T

A program has a unit of EACH tiles of 16 rows at a time, and each of its warps steps of
256 columns of its own: so the columns are split within the program, no sums leave it
unfinished, and no warp waits for another till a unit ends. A lane has its part of the
activations of a step in registers, straight from the L2 cache, and uses them for all
tiles of the unit; the weights come through `bulk_ring.py`, as many tiles as a ring has
places, across units.

Codes are multiplied as they are, and the sums of a scale's columns are scaled in
float32, as in several_activations.py. Minima are multiplied with the sums of x by
groups, which a warp takes once for all tiles of a unit.
"""

from jaxkern.gpu.bulk_ring import (
    all_have_read,
    begin_ring,
    has_come,
    own_memory,
    shared_word,
)
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.block_codes import (
    codes_of,
    fragments_of_scale,
    has_offsets,
    is_signed,
    scales_of,
    zero_of,
)
from jaxkern.triton.quant.fixed_point_codes import bytes_of_step
from jaxkern.triton.quant.fragments import (
    barrier,
    constant_rows,
    in_lanes,
    in_lanes4,
    mma,
    rows_of,
    scaled,
    signed_codes,
    twice,
    unsigned_codes,
)
from jaxkern.triton.quant.product_kernel import (
    begin_early,
    lanes_of,
    place_in,
    put,
    use_shared,
    wait_for_those_ahead,
)
from jaxkern.triton.quant.several_activations import added, store_two_floats
from jaxkern.triton.quant.shared_codes import read_shared


@constexpr_function
def pitch_of_sums(EACH):
    """Bytes of an activation's sums: lanes meet different banks."""
    return 64 * EACH + 16


@constexpr_function
def bytes_of_sums(EIGHTS, EACH):
    """What a warp puts of a unit."""
    return 8 * EIGHTS * pitch_of_sums(EACH)


@constexpr_function
def power_above(N):
    return 1 << (N - 1).bit_length()


@gluon_jit
def part_of_x(x_at, step, STEPS: gl.constexpr, HALVES: gl.constexpr):
    """A lane's activations of a step, of each fragment two words; zeros beyond STEPS."""
    there = in_lanes(step < STEPS) & (place_in(x_at, 3) >= 0)
    at = x_at + in_lanes(gl.minimum(step, STEPS - 1)) * (64 // HALVES)
    words = ()
    for f in gl.static_range(16 // HALVES):
        pair = gl.load(at + 4 * f, there, 0)
        words += (rows_of(pair),)
    return words


@gluon_jit
def sums_by_groups(x, nothing, FORMAT: gl.constexpr, HALVES: gl.constexpr):
    """Of each group of a part, the sums of the two activations of a lane's columns."""
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    ones = in_lanes4(constant_rows(nothing, 1))
    zeros = (x[0][0] * 0).to(gl.float32)
    found = ()
    if has_offsets(FORMAT):
        for j in gl.static_range(16 // HALVES // GROUP):
            sums = (zeros, zeros, zeros, zeros)
            for i in gl.static_range(GROUP):
                sums = mma(ones, x[GROUP * j + i], sums)
            found += ((sums[0], sums[1], sums[0], sums[1]),)
    return found


@gluon_jit
def add_part(
    words,
    c,
    x,
    group_sums,
    totals,
    nothing,
    HALVES: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """totals + the products of a part of a step of one tile."""
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    GROUPS: gl.constexpr = 16 // HALVES // GROUP
    magic = nothing + 0x43434343
    minus = nothing + -0x407F4080  # -1 in bfloat16, twice
    one = nothing + 0x3F803F80
    less = nothing + twice(-128 - zero_of(FORMAT))
    zeros = gl.full(totals[0].shape, 0.0, gl.float32, totals[0].type.layout)
    for j in gl.static_range(GROUPS):
        sums = (zeros, zeros, zeros, zeros)
        for i in gl.static_range(GROUP):
            first, second = codes_of(
                words, c, nothing, GROUP * j + i, FORMAT
            )
            if is_signed(FORMAT):
                a = signed_codes(first, second, magic, minus)
            else:
                a = unsigned_codes(first, second, magic)
                if not has_offsets(FORMAT):
                    a = added(a, one, less)
            sums = mma(in_lanes4(a), x[GROUP * j + i], sums)
        scales = scales_of(words, j, FORMAT)
        totals = scaled(totals, sums, scales[0], scales[1], False)
        if has_offsets(FORMAT):
            first = gl.fma(scales[0], -128.0, scales[2])
            second = gl.fma(scales[1], -128.0, scales[3])
            totals = scaled(totals, group_sums[j], first, second, False)
    return totals


@constexpr_function
def ask_for_all_text(BYTES, ALL):
    return f"""{{ .reg .pred leads, copies; setp.ne.b32 leads, $5, 0;
        setp.ne.b32 copies, $4, 0;
        @leads mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {ALL};
        @copies cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [$2], [$3], {BYTES}, [$1]; mov.b32 $0, 0; }}"""


@gluon_jit
def ask_for(tiles_at, n, there, at, warp, lane, SIZES: gl.constexpr):
    """Asks for the tiles of item n of a warp, a lane for each; there, if there is one."""
    TILES: gl.constexpr = SIZES[0]
    EACH: gl.constexpr = SIZES[1]
    STEPS: gl.constexpr = SIZES[2]
    TURNS: gl.constexpr = SIZES[3]
    BYTES: gl.constexpr = SIZES[4]
    PROGRAMS: gl.constexpr = SIZES[5]
    DEPTH: gl.constexpr = SIZES[6]
    unit = gl.program_id(0) + n // TURNS * PROGRAMS
    tile = gl.minimum(unit * EACH + lane, TILES - 1)
    step = gl.minimum(n % TURNS * gl.num_warps() + warp, STEPS - 1)
    source = tiles_at + (tile.to(gl.int64) * STEPS + step) * BYTES
    place = n % DEPTH
    leads = there & (lane == 0)
    copies = there & (lane < EACH)
    gl.inline_asm_elementwise(
        ask_for_all_text(BYTES, BYTES * EACH),
        "=r,r,r,l,r,r",
        [
            at[0] + 8 * place,
            at[1] + (BYTES * EACH) * place + BYTES * lane,
            source,
            copies.to(gl.int32),
            leads.to(gl.int32),
        ],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def steps_by_warps_kernel(
    x_ptr,
    tiles_ptr,
    residual_ptr,
    y_ptr,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    TILES: gl.constexpr,
    FORMAT: gl.constexpr,
    EIGHTS: gl.constexpr,
    EACH: gl.constexpr,
    HALVES: gl.constexpr,
    EARLY: gl.constexpr,
    PROGRAMS: gl.constexpr,
    DEPTH: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[ROWS, K]` bfloat16, tiles_ptr `[TILES, 16 row_bytes]`, y `[ROWS, 16 TILES]`.

    K is a multiple of 256. PROGRAMS walk over units of EACH tiles. A warp takes steps of
    256 / HALVES columns by turns, and has DEPTH of all tiles of a unit on their way.
    """
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = K // (256 // HALVES)
    TURNS: gl.constexpr = (STEPS + WARPS - 1) // WARPS
    BYTES: gl.constexpr = bytes_of_step(FORMAT) // HALVES
    SIZES: gl.constexpr = (TILES, EACH, STEPS, TURNS, BYTES, PROGRAMS, DEPTH)
    SUMS: gl.constexpr = bytes_of_sums(EIGHTS, EACH)
    PITCH: gl.constexpr = pitch_of_sums(EACH)
    LANES: gl.constexpr = lanes_of(WARPS, EIGHTS)
    LANES3: gl.constexpr = gl.SliceLayout(3, LANES)
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES3)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES3)))[None, None, :]
    zero = 0 * warp + 0 * g + 0 * c
    warp, g, c = warp + zero, g + zero, c + zero
    leads = (g + c == 0).to(gl.int32)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    own = own_memory(leads, RING)
    sums_at = own + warp * SUMS
    bars = own + WARPS * SUMS + warp * (8 * DEPTH)
    places = own + WARPS * (SUMS + 8 * DEPTH) + warp * (EACH * DEPTH * BYTES)
    tiles_at = tiles_ptr.to(gl.int64)
    lane = 4 * g + c
    mine = ((TILES + EACH - 1) // EACH - gl.program_id(0) + PROGRAMS - 1) // PROGRAMS
    begin_ring(bars, leads, DEPTH)
    for i in gl.static_range(DEPTH):
        ask_for(
            tiles_at, i, i < mine * TURNS, (bars, places), warp, lane, SIZES
        )
    if AHEAD == 2:
        wait_for_those_ahead()
    zeros = gl.full([WARPS, 8, 4, EIGHTS], 0.0, gl.float32, LANES)
    eight = place_in(zeros, 3)
    row = gl.minimum(eight * 8 + in_lanes(g), ROWS - 1)
    x_words = x_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    x_at = x_words + row * (K // 4) + in_lanes(c)
    nothing = (tiles_at >> 60).to(gl.int32) + zero  # of an address
    if EARLY:
        x = part_of_x(x_at, warp, STEPS, HALVES)
    for u in range(mine):
        totals = ()
        for _ in gl.static_range(EACH):
            totals += ((zeros, zeros, zeros, zeros),)
        for turn in range(TURNS):
            n = u * TURNS + turn
            place = n % DEPTH
            if EARLY:
                step = (turn + 1) % TURNS * WARPS + warp
                ahead = part_of_x(x_at, step, STEPS, HALVES)
            else:
                step = turn * WARPS + warp
                x = part_of_x(x_at, step, STEPS, HALVES)
            has_come(bars + 8 * place, n // DEPTH % 2 + zero)
            groups = sums_by_groups(x, nothing, FORMAT, HALVES)
            found = ()
            for t in gl.static_range(EACH):
                at = places + (BYTES * EACH) * place + BYTES * t
                words = read_shared(at, g, c, HALVES, FORMAT)
                if t == EACH - 1:
                    all_have_read(at)
                    more = n + DEPTH < mine * TURNS
                    ask_for(
                        tiles_at, n + DEPTH, more, (bars, places), warp, lane, SIZES
                    )
                total = add_part(
                    words, c, x, groups, totals[t], nothing, HALVES, FORMAT
                )
                found += (total,)
            totals = found
            if EARLY:
                x = ahead
        at = in_lanes(sums_at + c * (2 * PITCH) + g * 8) + eight * (8 * PITCH)
        if u > 0:
            barrier()  # all have read the sums of the unit before
        for t in gl.static_range(EACH):
            s = totals[t]
            store_two_floats(at + 64 * t, s[0], s[2], 1 + 0 * at)
            store_two_floats(at + (64 * t + PITCH), s[1], s[3], 1 + 0 * at)
        barrier()
        SIZE: gl.constexpr = power_above(128 * EACH * EIGHTS)
        FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        flat = gl.arange(0, SIZE, FLAT)
        row_of = flat // (16 * EACH)
        weight = flat % (16 * EACH)
        inside = row_of < ROWS
        from_ = gl.where(inside, row_of * PITCH + weight * 4, 0)
        from_ = from_ + own_memory(flat, RING)
        y = shared_word(from_, 0).to(gl.float32, bitcast=True)
        for w in gl.static_range(1, WARPS):
            y += shared_word(from_, w * SUMS).to(gl.float32, bitcast=True)
        unit = gl.program_id(0) + u * PROGRAMS
        column = unit * (16 * EACH) + weight
        out = row_of * (16 * TILES) + column
        put(y_ptr, residual_ptr, y, out, inside & (column < 16 * TILES))
