"""The kernel of all products with 16 packed rows side by side, for few activations.

    y = x w^T,  or  silu(x gate^T) * (x up^T);  x may be normalised, y added to another,
    gelu stand for silu and an operand for x up^T

A program has one or two tiles of 16 rows. Its warps share the columns of a tile, each
reads whole steps of 256, one step ahead, and every byte of the weights is read once.
Sums of up to eight activations are what the matrix instruction has columns for, so
one activation costs what eight do; more take several instructions for the same weights.
Activations are bfloat16: those of more digits come as a sum of two or three, side by
side. A norm is taken by every program for itself, into shared memory, while the first
weights are on their way.
"""

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
    DIRECT,
    RAGGED,
    as_pair,
    barrier,
    constant_rows,
    fragment,
    in_lanes,
    in_lanes4,
    mma,
    scaled,
    signed_codes,
    unsigned_codes,
)
from jaxkern.triton.quant.one_activation import (
    add_step_of_one,
    high_float,
    low_float,
    put_with_sums,
    shared_base,
)


@constexpr_function
def lanes_of(WARPS, TILES_OF_X):
    """Numbers [warps, 8, 4, columns of 8]: lane 4 g + c of each warp."""
    return gl.BlockedLayout(
        [1, 1, 1, TILES_OF_X], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )


@constexpr_function
def slice_but(AXIS, LAYOUT):
    """The layout of one dim of four; the last ones go first."""
    for axis in (3, 2, 1, 0):
        if axis != AXIS:
            LAYOUT = gl.SliceLayout(axis, LAYOUT)
    return LAYOUT


@constexpr_function
def source_of(SHARED, REST, COPIES):
    """See `fragment`."""
    return 32 * COPIES if SHARED else RAGGED if REST else DIRECT


@gluon_jit
def let_next_begin():
    """See gpu/dependent_launch.py, also of the next one."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1
    )


@gluon_jit
def begin_early(READS: gl.constexpr):
    """As the first thing of a kernel: it waits, or reads weights and waits then."""
    let_next_begin()
    if not READS:
        wait_for_those_ahead()


@gluon_jit
def wait_for_those_ahead():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1
    )


@gluon_jit
def use_shared(memory):
    """Has `global_smem` declared, the address of all shared memory; no instruction."""
    WARPS: gl.constexpr = gl.num_warps()
    words = memory.index(0).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], gl.int32, False, 1)


@gluon_jit
def put_normal_rows(
    x_ptr,
    norm_ptr,
    K: gl.constexpr,
    PADDED: gl.constexpr,
    EPS: gl.constexpr,
    ROWS: gl.constexpr,
    TERMS: gl.constexpr,
    COPIES: gl.constexpr,
):
    """x / rms(x) * norm to shared memory, as TERMS bfloat16 that add up to it.

    Word (f, n, c, i) has columns 16 f + 4 c + 2 i and the next of row n / TERMS.
    """
    WARPS: gl.constexpr = gl.num_warps()
    PAIRS: gl.constexpr = PADDED // 2
    LANES: gl.constexpr = gl.BlockedLayout([4, 2], [32, 1], [WARPS, 1], [1, 0])
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, LANES))
    column = 2 * pair[:, None] + gl.arange(0, 2, gl.SliceLayout(0, LANES))[None, :]
    weight = gl.load(norm_ptr + column, column < K, 0.0).to(gl.float32)
    to = shared_base(pair) + pair // 8 * (32 * COPIES) + pair % 8 * 4
    factors = ()
    for m in gl.static_range(ROWS):
        x = gl.load(x_ptr + m * K + column, column < K, 0.0).to(gl.float32)
        mean = gl.sum(gl.sum(x * x, 1), 0) / K
        factors += (gl.rsqrt(mean + EPS),)
    barrier()  # the sums are read, their memory is free
    for m in gl.static_range(ROWS):
        x = gl.load(x_ptr + m * K + column, column < K, 0.0).to(gl.float32)
        low, high = gl.split(x * factors[m] * weight)
        for t in gl.static_range(TERMS):
            word = as_pair(low, high)
            gl.inline_asm_elementwise(
                "st.shared.b32 [$1], $2; mov.b32 $0, $2;",
                "=r,r,r",
                [to + (m * TERMS + t) * 32, word],
                gl.int32,
                False,
                1,
            )
            low = low - low_float(word)
            high = high - high_float(word)
    barrier()


@gluon_jit
def activated(y, ACTIVATION: gl.constexpr):
    """silu(y), or gelu(y) by its tanh: y times the sigmoid of y, or of a polynomial."""
    z = y
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216057308 * y * (1 + 0.044715 * y * y)
    return y / (1 + gl.exp(-z))


@gluon_jit
def times(y, up_ptr, at, mask, ACTIVATION: gl.constexpr):
    """activation(y) * up where that is an operand, else y."""
    if up_ptr is not None:
        up = gl.load(up_ptr + at, mask, 0.0).to(gl.float32)
        y = activated(y, ACTIVATION) * up
    return y


@gluon_jit
def put(y_ptr, residual_ptr, y, at, mask):
    if residual_ptr is not None:
        y += gl.load(residual_ptr + at, mask, 0.0).to(gl.float32)
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask)


@gluon_jit
def finished(
    sums,
    PARTS: gl.constexpr,
    SHARES: gl.constexpr,
    GATED: gl.constexpr,
    TERMS: gl.constexpr,
    ACTIVATION: gl.constexpr = None,
):
    """The shares of the warps added, [parts, 8, activations of 8 columns, eights]."""
    EIGHTS: gl.constexpr = sums.shape[3]
    y = gl.sum(gl.reshape(sums, [SHARES, PARTS, 8, 4, EIGHTS]), 0)
    if TERMS == 4:
        y = gl.sum(gl.reshape(y, [PARTS, 8, 2, 2, EIGHTS]), 3)
    if GATED:
        of_gate = place_in(y, 0) == 0
        gate = gl.sum(gl.where(of_gate, y, 0.0), 0)
        up = gl.sum(gl.where(of_gate, 0.0, y), 0)
        y = gl.expand_dims(activated(gate, ACTIVATION) * up, 0)
    return y


@gluon_jit
def place_in(y, AXIS: gl.constexpr):
    """Positions along one of the four dims of y, as a tensor of its rank."""
    LAYOUT: gl.constexpr = y.type.layout  # else Triton 3.6 takes it for a number
    return along(AXIS, y.shape[AXIS], LAYOUT)


@gluon_jit
def along(AXIS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to SIZE - 1 along one of four dims."""
    at = gl.arange(0, SIZE, slice_but(AXIS, LAYOUT))
    for other in gl.static_range(4):
        if other != AXIS:
            at = gl.expand_dims(at, other)
    return at


@gluon_jit
def x_of_step(x_at, present, step, c, QUARTERS: gl.constexpr, FROM: gl.constexpr):
    """The activations of each warp's step, see `fragment`."""
    step = in_lanes(step)
    if FROM > 0:
        return (x_at + step * (16 * FROM),)
    elif FROM == 0:
        return x_at + step * 64, present
    else:
        return x_at + step * 64, present, QUARTERS - step * 64 - in_lanes(c)


@gluon_jit
def sums_of_step(step, c, n, PADDED: gl.constexpr):
    """Addresses of the sums of x of a step's groups, and of a lane's parts of them."""
    at = shared_base(n) + 2 * PADDED + in_lanes(step) * 32
    return at, at + PADDED // 8 + in_lanes(c) * 8


@gluon_jit
def add_step(
    words,
    c,
    x,
    totals,
    nothing,
    FORMAT: gl.constexpr,
    FROM: gl.constexpr,
    SINGLE: gl.constexpr,
):
    """totals + the products of one step; `nothing` is a zero that no compiler knows.

    Codes are multiplied as they are, small integers, which bfloat16 holds exactly;
    unsigned ones as 128 + code, which takes no arithmetic. The sums of a scale's
    columns are scaled in float32.
    """
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    magic = nothing + 0x43434343
    minus = nothing + -0x407F4080  # -1 in bfloat16, twice
    zeros = gl.full(totals[0].shape, 0.0, gl.float32, totals[0].type.layout)
    ones = in_lanes4(constant_rows(nothing, 1))
    zero = in_lanes4(constant_rows(nothing, -128 - zero_of(FORMAT)))
    for j in gl.static_range(16 // GROUP):
        sums = (zeros, zeros, zeros, zeros)
        of_x = sums
        for i in gl.static_range(GROUP):
            b = fragment(x, GROUP * j + i, FROM)
            first, second = codes_of(words, c, nothing, GROUP * j + i, FORMAT)
            if is_signed(FORMAT):
                a = signed_codes(first, second, magic, minus)
            else:
                a = unsigned_codes(first, second, magic)
                if has_offsets(FORMAT):
                    of_x = mma(ones, b, of_x)
                else:
                    sums = mma(zero, b, sums)
            sums = mma(in_lanes4(a), b, sums)
        scales = scales_of(words, j, FORMAT)
        totals = scaled(totals, sums, scales[0], scales[1], SINGLE)
        if has_offsets(FORMAT):
            first = gl.fma(scales[0], -128.0, scales[2])
            second = gl.fma(scales[1], -128.0, scales[3])
            totals = scaled(totals, of_x, first, second, SINGLE)
    return totals


@gluon_jit
def put_totals(
    totals,
    known,
    pointers,
    ROWS: gl.constexpr,
    TERMS: gl.constexpr,
    TILES: gl.constexpr,
    GATED: gl.constexpr,
    PARTS: gl.constexpr,
    SHARES: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """The sums of a program: columns 2 c and 2 c + 1 of rows 2 g and 2 g + 1.

    `pointers` to ids, to what is multiplied, to what is added, to the result.
    """
    ids_ptr, up_ptr, residual_ptr, y_ptr = pointers
    t0, t1, t2, t3 = totals
    BESIDE: gl.constexpr = 2 if TERMS == 1 else 1
    if TERMS == 1:
        sums = ((t0, 0, 0), (t1, 1, 0), (t2, 0, 1), (t3, 1, 1))
    else:
        sums = ((t0 + t1, 0, 0), (t2 + t3, 0, 1))
    for i in gl.static_range(len(sums)):
        y = finished(sums[i][0], PARTS, SHARES, GATED, TERMS, ACTIVATION)
        unit = gl.program_id(0) * y.shape[0] + place_in(y, 0)
        row = y.shape[2] * place_in(y, 3) + place_in(y, 2)
        row = row * BESIDE + sums[i][1]
        out = (row * TILES + unit) * 16 + 2 * place_in(y, 1) + sums[i][2]
        if ids_ptr is not None:
            y = gl.where(known, y, 0.0)
        here = (row < ROWS) & (unit < TILES)
        y = times(y, up_ptr, out, here, ACTIVATION)
        put(y_ptr, residual_ptr, y, out, here)


@gluon_jit
def packed_product_kernel(
    x_ptr,
    ids_ptr,
    norm_ptr,
    tiles_ptr,
    up_ptr,
    residual_ptr,
    y_ptr,
    ROWS: gl.constexpr,
    TERMS: gl.constexpr,
    K: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    TILES: gl.constexpr,
    TILE_PAIRS: gl.constexpr,
    FORMAT: gl.constexpr,
    EPS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PARTS: gl.constexpr,
    SHARES: gl.constexpr,
    PADDED: gl.constexpr,
    COPIES: gl.constexpr,
    WORDS: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    SUMMED: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """ROWS activations of TERMS each, eight in all; tiles_ptr `[TILES, 16 row_bytes]`.

    Where GATED, up's TILES tiles stand behind those of gate. PARTS tiles a program,
    SHARES warps a tile. x is `[ROWS * TERMS, K]`
    bfloat16, or with a norm `[ROWS, K]` of any dtype, of which COPIES rows of terms
    stand in shared memory. With ids an activation has TOP_K slots, each with programs
    of its own, which name one of EXPERTS; y is zero in slots that name none. One
    activation may be SUMMED by groups, see one_activation.py. The first weights are
    read before the kernel ahead has ended, where AHEAD is READ.
    """
    READS_EARLY: gl.constexpr = AHEAD == 2 and ids_ptr is None
    if AHEAD:
        begin_early(READS_EARLY)
    WARPS: gl.constexpr = PARTS * SHARES
    LANES: gl.constexpr = lanes_of(WARPS, 1)
    LANES3: gl.constexpr = gl.SliceLayout(3, LANES)
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES3)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES3)))[None, None, :]
    part = warp % PARTS
    share = warp // PARTS
    if GATED:
        tile = gl.program_id(0) + part * TILES
    else:
        tile = gl.minimum(gl.program_id(0) * PARTS + part, TILES - 1)
    tile = tile.to(gl.int64)
    known = True
    if ids_ptr is not None:
        slot = gl.program_id(1)
        expert = gl.load(ids_ptr + slot)
        known = (expert >= 0) & (expert < EXPERTS)
        tile = tile + gl.where(known, expert, 0).to(gl.int64) * TILES
        x_ptr += slot // TOP_K * (TERMS * K)
        y_ptr += slot * (16 * TILES)
    pairs = tiles_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    at = pairs + tile * TILE_PAIRS
    STEPS: gl.constexpr = (K + 255) // 256
    TURNS: gl.constexpr = (STEPS + SHARES - 1) // SHARES
    words = read_step(at, g, c, share, NUM_BLOCKS, FORMAT)
    if READS_EARLY:
        wait_for_those_ahead()
    zeros = gl.full([WARPS, 8, 4, 1], 0.0, gl.float32, LANES)
    totals = (zeros, zeros, zeros, zeros)
    n = in_lanes(g)
    present = n < ROWS * TERMS
    SINGLE: gl.constexpr = ROWS * TERMS == 1
    IN_SHARED: gl.constexpr = SUMMED or norm_ptr is not None
    if IN_SHARED:
        memory = gl.allocate_shared_memory(
            gl.int32, [WORDS // 32, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        use_shared(memory)
        if SUMMED:
            put_with_sums(x_ptr, norm_ptr, K, PADDED, EPS)
        else:
            put_normal_rows(x_ptr, norm_ptr, K, PADDED, EPS, ROWS, TERMS, COPIES)
        x_at = shared_base(n + in_lanes(c)) + (n % COPIES) * 32 + in_lanes(c) * 8
    else:
        x64 = x_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
        x_at = x64 + n * (K // 4) + in_lanes(c)
    nothing = (at.to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    FROM: gl.constexpr = source_of(IN_SHARED, K % (256 * SHARES), COPIES)
    for turn in range(TURNS - 1):
        step = turn * SHARES + share
        ahead = read_step(at, g, c, step + SHARES, NUM_BLOCKS, FORMAT)
        x = x_of_step(x_at, present, step, c, K // 4, FROM)
        if SUMMED:
            sums_at, parts_at = sums_of_step(step, c, n, PADDED)
            totals = add_step_of_one(
                words, c, x, sums_at, parts_at, totals, nothing, FROM, FORMAT
            )
        else:
            totals = add_step(words, c, x, totals, nothing, FORMAT, FROM, SINGLE)
        words = ahead
    step = (TURNS - 1) * SHARES + share
    x = x_of_step(x_at, present, step, c, K // 4, FROM)
    if SUMMED:
        sums_at, parts_at = sums_of_step(step, c, n, PADDED)
        totals = add_step_of_one(
            words, c, x, sums_at, parts_at, totals, nothing, FROM, FORMAT
        )
    else:
        totals = add_step(words, c, x, totals, nothing, FORMAT, FROM, SINGLE)
    if IN_SHARED:
        barrier()  # the sums of all warps may take the memory of x
    put_totals(
        totals,
        known,
        (ids_ptr, up_ptr, residual_ptr, y_ptr),
        ROWS,
        TERMS,
        TILES,
        GATED,
        PARTS,
        SHARES,
        ACTIVATION,
    )
