"""The kernel of all products with rows of packed codes, for few activations.

    y = x w^T,  w = scale * (code - zero) + offset

A program has 16 rows. Its warps share the columns of the rows, a batch of steps at a
time, and read one batch ahead; every byte of the weights is read once. Codes are
multiplied as they are, small numbers that bfloat16 holds exactly, and the sums of a
scale's columns are scaled in float32.

What a matrix instruction adds up comes from four lanes, which have neighbouring units.
Where one scale serves all of them the eight columns of sums are eight activations.
Where not (`split`), each of the four lanes has a column of sums of its own, so that
eight columns are two activations.
"""

from jaxkern.gpu.triton_call import gl, gluon_jit
from jaxkern.triton.quant.fragments import in_lanes, in_lanes4, mma, twice
from jaxkern.triton.quant.product_kernel import (
    finished,
    lanes_of,
    place_in,
    put,
)
from jaxkern.triton.quant.row_codes import (
    codes_of_fragment,
    has_nan,
    in_registers,
    nan_codes,
    pair_of_x,
    read_unit,
    read_x,
    scale_as_float,
)


@gluon_jit
def read_batch(rows, c, batch, P: gl.constexpr):
    """The words of either row of a lane, of all steps of a batch."""
    FORMAT: gl.constexpr = P.format
    BATCH: gl.constexpr = P.batch
    words = ()
    for s in gl.static_range(BATCH):
        if P.ragged:
            unit = gl.minimum((batch * P.batch + s) * 4 + c, P.units - 1)
            first = read_unit(rows[0] + unit * P.words, 0, FORMAT)
            second = read_unit(rows[1] + unit * P.words, 0, FORMAT)
        else:
            unit = batch * (P.batch * 4) + c
            first = read_unit(rows[0] + unit * P.words, s * 16 * P.words, FORMAT)
            second = read_unit(rows[1] + unit * P.words, s * 16 * P.words, FORMAT)
        words += ((first, second),)
    return words


@gluon_jit
def read_scales(scales_ptr, rows, c, batch, P: gl.constexpr):
    """Of each scale of a batch: of either row, for columns 2 c and 2 c + 1 of sums."""
    BATCH: gl.constexpr = P.batch
    STEPS: gl.constexpr = P.steps_of_scale
    UNIT: gl.constexpr = P.unit
    PART: gl.constexpr = P.part
    BESIDE: gl.constexpr = 1 if P.paired else 2
    found = ()
    for s in gl.static_range(0, BATCH, STEPS):
        for first in gl.static_range(0, UNIT, PART):
            for beside in gl.static_range(BESIDE):
                column = (batch * P.batch + s) * P.step + first
                if P.split:
                    column = column + (2 * c + beside) % 4 * P.unit
                group = column // P.group
                if P.ragged:
                    group = gl.minimum(group, P.groups - 1)
                for r in gl.static_range(2):
                    found += (gl.load(scales_ptr + (rows[r] + group)),)
    return found


@gluon_jit
def sums_of(words, numbers, x, sums, of_x, FIRST: gl.constexpr, P: gl.constexpr):
    """Adds the products of the columns of a unit that share a scale."""
    FORMAT: gl.constexpr = P.format
    CHUNK: gl.constexpr = P.chunk
    LAST: gl.constexpr = FIRST + P.part
    rows = in_lanes4(numbers[len(numbers) - 1])
    for at in gl.static_range(FIRST, LAST, CHUNK):
        xs = ()
        for j in gl.static_range(CHUNK // 8):
            xs += read_x(x, 2 * at + 16 * j)
        for f in gl.static_range(CHUNK // 4):
            b = (pair_of_x(xs, 2 * f, FORMAT), pair_of_x(xs, 2 * f + 1, FORMAT))
            a = codes_of_fragment(words[0], words[1], numbers, at // 4 + f, FORMAT)
            if P.offsets != "":
                of_x = mma(rows, b, of_x)
            elif P.correction != 0:
                sums = mma(rows, b, sums)
            sums = mma(in_lanes4(a), b, sums)
    return sums, of_x


@gluon_jit
def scaled_by(totals, sums, scales, P: gl.constexpr):
    """totals + scale * sums, scales of the two rows and of both columns of a lane."""
    SECOND: gl.constexpr = 0 if P.paired else 2
    t0 = gl.fma(in_lanes(scales[0]), sums[0], totals[0])
    t2 = gl.fma(in_lanes(scales[1]), sums[2], totals[2])
    if P.single:
        return t0, totals[1], t2, totals[3]
    else:
        t1 = gl.fma(in_lanes(scales[SECOND]), sums[1], totals[1])
        return t0, t1, t2, gl.fma(in_lanes(scales[SECOND + 1]), sums[3], totals[3])


@gluon_jit
def scales_of(scales, PLACE: gl.constexpr, P: gl.constexpr):
    """Those of one group in float32, two or four."""
    KIND: gl.constexpr = P.kind
    EACH: gl.constexpr = 2 if P.paired else 4
    found = ()
    for i in gl.static_range(EACH):
        found += (scale_as_float(scales[PLACE * EACH + i], KIND),)
    return found


@gluon_jit
def offsets_of(offsets, scales, PLACE: gl.constexpr, P: gl.constexpr):
    """What the sum of the activations is multiplied by: codes came with an excess."""
    EACH: gl.constexpr = 2 if P.paired else 4
    found = ()
    for i in gl.static_range(EACH):
        offset = offsets[PLACE * EACH + i].to(gl.float32)
        if P.offsets == "zero":
            offset = -scales[i] * offset
        found += (gl.fma(scales[i], -1.0 * P.constant, offset),)
    return found


@gluon_jit
def add_batch(
    words,
    numbers,
    scales,
    offsets,
    x_at,
    zeros_at,
    n,
    c,
    batch,
    totals,
    P: gl.constexpr,
):
    """totals + the products of one batch."""
    zeros = gl.full(totals[0].shape, 0.0, gl.float32, totals[0].type.layout)
    PART: gl.constexpr = P.part
    PARTS: gl.constexpr = P.unit // P.part
    STEPS: gl.constexpr = P.steps_of_scale
    BATCH: gl.constexpr = P.batch
    sums = (zeros, zeros, zeros, zeros)
    of_x = sums
    for s in gl.static_range(BATCH):
        unit = in_lanes((batch * BATCH + s) * 4 + c)
        x = (x_at + unit * P.unit).to(gl.int64)
        if P.split:  # a column of sums for each lane
            x = gl.where(n % 4 == in_lanes(c), x, zeros_at)
        if P.ragged:
            x = gl.where(unit < P.units, x, zeros_at)
        for p in gl.static_range(PARTS):
            sums, of_x = sums_of(words[s], numbers, x, sums, of_x, p * PART, P)
            if (s + 1) % STEPS == 0:
                scale = scales_of(scales, s // STEPS * PARTS + p, P)
                totals = scaled_by(totals, sums, scale, P)
                if P.offsets != "":
                    offset = offsets_of(offsets, scale, s // STEPS * PARTS + p, P)
                    totals = scaled_by(totals, of_x, offset, P)
                sums = (zeros, zeros, zeros, zeros)
                of_x = sums
    return totals


@gluon_jit
def nan_where(totals, nans):
    """NaN in all columns of a row of which a lane has found a NaN."""
    first = gl.where((nans[0] & -0x7F7F7F80) != 0, 0x7FC0, 0)
    second = gl.where((nans[1] & -0x7F7F7F80) != 0, 0x7FC0, 0)
    a = in_lanes4((first, second, first * 0, first * 0))
    ones = (in_lanes(first * 0 + 0x3F803F80), in_lanes(first * 0 + 0x3F803F80))
    return mma(a, ones, totals)


@gluon_jit
def row_product_kernel(
    x_ptr,
    ids_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    factors_ptr,
    zeros_ptr,
    y_ptr,
    P: gl.constexpr,
):
    """x `[activations, columns]` bfloat16; codes `[experts * rows, row_words]` int32.

    scales `[experts * rows / rows_of_scale, groups]`, offsets the same, factors
    `[rows]`, y `[activations, rows]`, or with ids `[activations * top_k, rows]`.
    """
    FORMAT: gl.constexpr = P.format
    BATCH: gl.constexpr = P.batch
    SHARES: gl.constexpr = P.shares
    EIGHTS: gl.constexpr = P.eights
    LANES: gl.constexpr = lanes_of(SHARES, EIGHTS)
    LANES3: gl.constexpr = gl.SliceLayout(3, LANES)
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES3)
    share = gl.arange(0, SHARES, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES3)))[None, None, :]
    g = g + 0 * share
    first = gl.program_id(1) * P.together  # activation or slot of an expert
    words_ptr = codes_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    known = True
    if ids_ptr is not None:
        expert = gl.load(ids_ptr + first)
        known = (expert >= 0) & (expert < P.experts)
        expert = gl.where(known, expert, 0).to(gl.int64)
        words_ptr += expert * (P.rows * P.row_words)
        scales_ptr += expert * (P.rows // P.rows_of_scale * P.groups)
        if offsets_ptr is not None:
            offsets_ptr += expert * (P.rows // P.rows_of_scale * P.groups)
    row = gl.minimum(gl.program_id(0) * 16 + g, P.rows - 1)
    below = gl.minimum(gl.program_id(0) * 16 + g + 8, P.rows - 1)
    row_at = words_ptr + row.to(gl.int64) * P.row_words
    rows = (row_at, words_ptr + below.to(gl.int64) * P.row_words)
    scale_rows = (
        row // P.rows_of_scale * P.groups,
        below // P.rows_of_scale * P.groups,
    )
    zeros = gl.full([SHARES, 8, 4, EIGHTS], 0.0, gl.float32, LANES)
    totals = (zeros, zeros, zeros, zeros)
    n = in_lanes(g) + 8 * place_in(zeros, 3)
    mine = gl.minimum(n // 4 if P.split else n, P.together - 1)
    if ids_ptr is not None:
        mine = mine + first // P.top_k
    else:
        mine = gl.minimum(mine + first, P.activations - 1)
    x_at = x_ptr + mine * P.columns
    zeros_at = zeros_ptr.to(gl.int64)  # read in place of activations that are not
    nothing = (row_at.to(gl.int64) >> 60).to(gl.int32) + c * 0  # of an address
    FACTOR: gl.constexpr = P.factor
    same = nothing + twice(FACTOR)
    numbers = in_registers(nothing, FORMAT)
    numbers += ((same, same, same, same),)
    nans = (c * 0 + g * 0, c * 0 + g * 0)
    batch = share
    words = read_batch(rows, c, batch, P)
    scales = read_scales(scales_ptr, scale_rows, c, batch, P)
    offsets = ()
    if offsets_ptr is not None:
        offsets = read_scales(offsets_ptr, scale_rows, c, batch, P)
    for turn in range(P.turns - 1):
        batch = turn * P.shares + share
        ahead = batch + P.shares
        next_words = read_batch(rows, c, ahead, P)
        next_scales = read_scales(scales_ptr, scale_rows, c, ahead, P)
        next_offsets = ()
        if offsets_ptr is not None:
            next_offsets = read_scales(offsets_ptr, scale_rows, c, ahead, P)
        if has_nan(FORMAT):
            for s in gl.static_range(BATCH):
                nans = (
                    nan_codes(words[s][0], nans[0]),
                    nan_codes(words[s][1], nans[1]),
                )
        totals = add_batch(
            words, numbers, scales, offsets, x_at, zeros_at, n, c, batch, totals, P
        )
        words = next_words
        scales = next_scales
        offsets = next_offsets
    batch = (P.turns - 1) * P.shares + share
    totals = add_batch(
        words, numbers, scales, offsets, x_at, zeros_at, n, c, batch, totals, P
    )
    if has_nan(FORMAT):
        for s in gl.static_range(BATCH):
            nans = (nan_codes(words[s][0], nans[0]), nan_codes(words[s][1], nans[1]))
        totals = nan_where(totals, nans)
    # columns 2 c and 2 c + 1 of rows g and g + 8
    t0, t1, t2, t3 = totals
    if P.split:
        sums = ((t0 + t1, 0, 0), (t2 + t3, 0, 8))
    else:
        sums = ((t0, 0, 0), (t1, 1, 0), (t2, 0, 8), (t3, 1, 8))
    BESIDE: gl.constexpr = 1 if P.split else 2
    for i in gl.static_range(len(sums)):
        y = finished(sums[i][0], 1, SHARES, False, 4 if P.split else 1)
        activation = (y.shape[2] * place_in(y, 3) + place_in(y, 2)) * BESIDE + sums[i][
            1
        ]
        row = gl.program_id(0) * 16 + place_in(y, 1) + sums[i][2]
        here = (activation < P.together) & (row < P.rows) & (place_in(y, 0) == 0)
        if ids_ptr is not None:
            y = gl.where(known, y, 0.0)
            here = here & (activation + first < P.activations * P.top_k)
        else:
            here = here & (activation + first < P.activations)
        if factors_ptr is not None:
            y = y * gl.load(factors_ptr + row, here, 0.0).to(gl.float32)
        put(y_ptr, None, y, (first + activation) * P.rows + row, here)
