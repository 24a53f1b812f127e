"""The kernel of products of packed rows with up to 16 activations.

    y = x w^T

What a step of 256 columns needs of x is many times what it needs of 16 rows of weights,
so a program's warps have a tile of 16 rows each and share the activations: a slab of
them for each step comes to shared memory by asynchronous copies, two steps ahead. Each
byte of the weights is read once, a step ahead, into registers.

Codes are multiplied as they are, and the sums of a scale's columns are scaled in
float32, as in product_kernel.py. Minima are multiplied with the sums of x by groups,
which the warps take once for all tiles. Where rows are too few for the GPU, programs
split the columns, and XLA adds up their sums.
"""

from jaxkern.gpu.bulk_ring import own_memory
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.block_codes import (
    codes_of,
    fragments_of_scale,
    has_offsets,
    is_signed,
    read_step,
    scales_of,
    zero_of,
)
from jaxkern.triton.quant.fragments import (
    barrier,
    constant_rows,
    fma_of_pairs,
    fragment,
    in_lanes,
    in_lanes4,
    mma,
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

PITCH = 544  # bytes of a row in a slab: eight rows meet different banks


@constexpr_function
def pitch():
    return PITCH


@constexpr_function
def bytes_of_slab(EIGHTS):
    return 8 * EIGHTS * PITCH


@constexpr_function
def bytes_of_memory(EIGHTS, FORMAT):
    """Three slabs: of this step and of the two that come; sums of two."""
    return 3 * bytes_of_slab(EIGHTS) + bytes_of_group_sums(EIGHTS, FORMAT)


@constexpr_function
def groups_of(FORMAT):
    """How many scales a row has in a step."""
    return 16 // fragments_of_scale(FORMAT)


@constexpr_function
def bytes_of_group_sums(EIGHTS, FORMAT):
    """Of two slabs."""
    return groups_of(FORMAT) * 64 * EIGHTS if has_offsets(FORMAT) else 0


@gluon_jit
def copy_16_bytes(to, source, BYTES):
    """Zeros where BYTES is 0."""
    gl.inline_asm_elementwise(
        "cp.async.cg.shared.global [$1], [$2], 16, $3; mov.b32 $0, 0;",
        "=r,r,l,r",
        [to, source, BYTES],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def end_of_copies(any):
    """The copies since the last end are one group."""
    gl.inline_asm_elementwise(
        "cp.async.commit_group; mov.b32 $0, $1;", "=r,r", [any], gl.int32, False, 1
    )


@constexpr_function
def wait_text(LATER):
    return f"cp.async.wait_group {LATER}; mov.b32 $0, $1;"


@gluon_jit
def wait_for_copies(any, LATER: gl.constexpr):
    """Returns when all groups of this thread have come but the LATER last ones."""
    gl.inline_asm_elementwise(wait_text(LATER), "=r,r", [any], gl.int32, False, 1)


@gluon_jit
def copy_slab(
    rows,
    left,
    step,
    stage,
    last,
    RING: gl.constexpr,
    K: gl.constexpr,
    EIGHTS: gl.constexpr,
):
    """Starts the copy of the rows' columns of a step; zeros for rows that are not.

    `left` is how many rows there are; nothing is copied from step `last` on.
    """
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = gl.arange(0, 256 * EIGHTS, FLAT)
    row = place // 32
    column = step * 256 + place % 32 * 8
    there = (row < left) & (column < K) & (step < last)
    source = (rows + gl.where(there, row * K + column, 0)).to(gl.int64)
    to = own_memory(place, RING) + stage * bytes_of_slab(EIGHTS)
    to = to + row * pitch() + place % 32 * 16
    copy_16_bytes(to, source, gl.where(there, 16, 0))


@constexpr_function
def two_floats_text(OFFSET):
    return f"ld.shared.v2.f32 {{$0, $1}}, [$2+{OFFSET}];"


@gluon_jit
def two_floats(at, OFFSET: gl.constexpr):
    return gl.inline_asm_elementwise(
        two_floats_text(OFFSET), "=f,=f,r", [at], (gl.float32, gl.float32), False, 1
    )


@gluon_jit
def store_two_floats(at, first, second, stores):
    gl.inline_asm_elementwise(
        "{ .reg .pred stores; setp.ne.b32 stores, $4, 0;"
        " @stores st.shared.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }",
        "=r,r,f,f,r",
        [at, first, second, stores],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def put_group_sums(x_at, sums_at, warp, leads, nothing, FORMAT: gl.constexpr):
    """The sums of x by groups of columns to shared memory, some groups by each warp.

    `sums_at` is where a lane has the two activations of its columns of sums.
    """
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    GROUPS: gl.constexpr = groups_of(FORMAT)
    WARPS: gl.constexpr = gl.num_warps()
    TURNS: gl.constexpr = (GROUPS + WARPS - 1) // WARPS
    ones = in_lanes4(constant_rows(nothing, 1))
    zeros = (x_at * 0).to(gl.float32)
    for turn in gl.static_range(TURNS):
        group = warp + turn * WARPS
        there = leads * (group < GROUPS).to(gl.int32)
        group = in_lanes(gl.minimum(group, GROUPS - 1))
        sums = (zeros, zeros, zeros, zeros)
        for i in gl.static_range(GROUP):
            b = fragment((x_at + group * (GROUP * 32),), i, 32)
            sums = mma(ones, b, sums)
        at = sums_at + group * (32 * x_at.shape[3])
        store_two_floats(at, sums[0], sums[1], in_lanes(there) + 0 * at)


@gluon_jit
def add_shared_step(words, c, x, sums_at, totals, nothing, FORMAT: gl.constexpr):
    """totals + the products of one step; `nothing` is a zero that no compiler knows."""
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    EIGHTS: gl.constexpr = totals[0].shape[3]
    magic = nothing + 0x43434343
    minus = nothing + -0x407F4080  # -1 in bfloat16, twice
    one = nothing + 0x3F803F80
    less = nothing + twice(-128 - zero_of(FORMAT))
    zeros = gl.full(totals[0].shape, 0.0, gl.float32, totals[0].type.layout)
    for j in gl.static_range(16 // GROUP):
        sums = (zeros, zeros, zeros, zeros)
        for i in gl.static_range(GROUP):
            b = fragment((x,), GROUP * j + i, 32)
            first, second = codes_of(words, c, nothing, GROUP * j + i, FORMAT)
            if is_signed(FORMAT):
                a = signed_codes(first, second, magic, minus)
            else:
                a = unsigned_codes(first, second, magic)
                if not has_offsets(FORMAT):
                    a = added(a, one, less)
            sums = mma(in_lanes4(a), b, sums)
        scales = scales_of(words, j, FORMAT)
        totals = scaled(totals, sums, scales[0], scales[1], False)
        if has_offsets(FORMAT):
            low, high = two_floats(sums_at, j * 32 * EIGHTS)
            first = gl.fma(scales[0], -128.0, scales[2])
            second = gl.fma(scales[1], -128.0, scales[3])
            totals = scaled(totals, (low, high, low, high), first, second, False)
    return totals


@gluon_jit
def added(a, one, number):
    """The pairs of bfloat16 of four registers, each plus a number."""
    return (
        fma_of_pairs(a[0], one, number),
        fma_of_pairs(a[1], one, number),
        fma_of_pairs(a[2], one, number),
        fma_of_pairs(a[3], one, number),
    )


@gluon_jit
def several_activations_kernel(
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
    EIGHTS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[ROWS, K]` bfloat16, tiles_ptr `[TILES, 16 row_bytes]`, y `[ROWS, 16 TILES]`.

    A program has a tile of each warp and one of BLOCKS of 8 EIGHTS activations. Where
    the second axis has several programs, each has STEPS steps of the columns, and y is
    `[programs, ROWS, 16 TILES]`, the sums of each.
    """
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = lanes_of(WARPS, EIGHTS)
    LANES3: gl.constexpr = gl.SliceLayout(3, LANES)
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES3)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES3)))[None, None, :]
    tile = gl.program_id(0) // BLOCKS * WARPS + warp
    block = gl.program_id(0) % BLOCKS
    pairs = tiles_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    at = pairs + gl.minimum(tile, TILES - 1).to(gl.int64) * TILE_PAIRS
    first = gl.program_id(1) * STEPS
    last = gl.minimum(first + STEPS, (K + 255) // 256)
    words = read_step(at, g, c, first, NUM_BLOCKS, FORMAT)
    if AHEAD == 2:
        wait_for_those_ahead()
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    zeros = gl.full([WARPS, 8, 4, EIGHTS], 0.0, gl.float32, LANES)
    eight = place_in(zeros, 3)
    SLAB: gl.constexpr = bytes_of_slab(EIGHTS)
    own = own_memory(c + 0 * g + 0 * warp, RING)
    x_at = in_lanes(own + g * pitch() + c * 8) + eight * (8 * pitch())
    sums_at = in_lanes(own + 3 * SLAB + c * 8) + eight * 32
    leads = (g + 0 * c + 0 * warp == 0).to(gl.int32)
    rows = x_ptr + block * (8 * EIGHTS * K)
    left = ROWS - block * (8 * EIGHTS)
    for i in gl.static_range(2):
        copy_slab(rows, left, first + i, i, last, RING, K, EIGHTS)
        end_of_copies(c)
    nothing = (at.to(gl.int64) >> 60).to(gl.int32) + c * 0 + g * 0  # of an address
    totals = (zeros, zeros, zeros, zeros)
    SUMS: gl.constexpr = bytes_of_group_sums(EIGHTS, FORMAT) // 2
    if SUMS > 0:
        wait_for_copies(c, 1)
        barrier()
        put_group_sums(x_at, sums_at, warp, leads, nothing, FORMAT)
    for step in range(first, last):
        # with the next slab, of which the sums are taken
        wait_for_copies(c, 0 if SUMS > 0 else 1)
        barrier()  # all have these slabs, and have done with the one before
        stage = (step - first) % 3
        to = (step - first + 2) % 3
        copy_slab(rows, left, step + 2, to, last, RING, K, EIGHTS)
        end_of_copies(c)
        ahead = read_step(at, g, c, gl.minimum(step + 1, last - 1), NUM_BLOCKS, FORMAT)
        x = x_at + stage * SLAB
        now = sums_at + (step - first) % 2 * SUMS
        if SUMS > 0:
            next_x = x_at + (step - first + 1) % 3 * SLAB
            next_sums = sums_at + (step - first + 1) % 2 * SUMS
            put_group_sums(next_x, next_sums, warp, leads, nothing, FORMAT)
        totals = add_shared_step(words, c, x, now, totals, nothing, FORMAT)
        words = ahead
    # columns 2 c and 2 c + 1 of rows 2 g and 2 g + 1
    row = block * (8 * EIGHTS) + eight * 8 + in_lanes(2 * c)
    column = in_lanes(tile * 16 + 2 * g)
    there = in_lanes(tile < TILES)
    out = (gl.program_id(1) * ROWS + row) * (16 * TILES) + column
    for i in gl.static_range(4):
        here = there & (row + i % 2 < ROWS)
        put(y_ptr, residual_ptr, totals[i], out + i % 2 * (16 * TILES) + i // 2, here)
