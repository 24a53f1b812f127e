"""Codes of GGUF blocks for products of integers with one activation, lane by lane.

As in `block_codes.py` lane 4 g + c has rows 2 g and 2 g + 1 of a tile of 16, but all
columns of groups of its own: of the groups of 256 columns

| format | groups of lane c |
|---|---|
| Q4_K, Q5_K, MXFP4 | 2 c and 2 c + 1, of 32 columns |
| Q8_0 | c and c + 4, of 32 columns |
| Q6_K | c, c + 4, c + 8 and c + 12, of 16 columns |

So a lane scales its own sums and no other's. The matrix instruction m16n8k32 adds up
what four lanes have; its eight columns keep them apart: columns 2 c and 2 c + 1 are the
two digits of x in the places of lane c, and zero in those of other lanes.

x stands in shared memory in the order in which lanes want it: 16 bytes for each digit,
lane c and quarter of a step, which are two words of four columns for either of two
matrix instructions. Of MXFP4 the four of word v are columns 2 v and 2 v + 1 of a group
and those 16 behind them: what four neighbouring fields are of.
"""

from jaxkern.gpu.bulk_ring import shared_pair, shared_word
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.primitives.quant.tile_formats import OWN_FORMATS, TILE_FORMATS
from jaxkern.triton.quant.block_codes import BYTES
from jaxkern.triton.quant.fixed_point_fours import (
    add_four_bits,
    is_e2m1,
    is_four_bits,
    place_of_four_bits,
    read_four_bits,
)
from jaxkern.triton.quant.fragments import float_of_half, rows_of
from jaxkern.triton.quant.whole_numbers import (
    add_products,
    as_float,
    four_words,
    of_digits,
    picked,
    word_of,
)

FORMATS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", *OWN_FORMATS)
STEP_OF_X = 512  # bytes: two digits of 256 columns


@constexpr_function
def bytes_of_step(FORMAT):
    """Of 256 columns of 16 rows."""
    return BYTES[FORMAT] * 16 * (256 // TILE_FORMATS[FORMAT].elements)


@constexpr_function
def group_of(FORMAT):
    return 16 if FORMAT in ("Q6_K", "NVFP4_256") else 32


@constexpr_function
def excess_of(FORMAT):
    """What codes are larger by than what they stand for, where sums are put right."""
    return 32 if FORMAT == "Q6_K" else 12 if is_e2m1(FORMAT) else 0


@constexpr_function
def step_of_sums(FORMAT):
    """Bytes of what is kept of the groups of a step."""
    return 32 if FORMAT == "Q8_0" else 2048 // group_of(FORMAT)


@constexpr_function
def step_of_x():
    return STEP_OF_X


@gluon_jit
def place_of_word(group, word, FORMAT: gl.constexpr):
    """Where word 4 of a group's columns stands within x, in bytes; the digit aside."""
    PER_STEP: gl.constexpr = 256 // group_of(FORMAT)
    step = group // PER_STEP
    j = group % PER_STEP
    quarter = word // 2
    slot = word % 2
    if is_four_bits(FORMAT):
        c, quarter, slot, second = place_of_four_bits(j, word, FORMAT)
    elif FORMAT == "Q6_K":
        c = j % 4
        quarter = j // 8 * 2 + quarter
        slot = slot ^ (c % 2)
        second = j // 4 % 2
    elif FORMAT == "Q8_0":
        c = j % 4
        second = j // 4
    else:
        c = j // 2
        slot = slot ^ (c % 2)
        second = j % 2
    return step * step_of_x() + quarter * 128 + c * 32 + (second * 2 + slot) * 4


@gluon_jit
def place_of_sums(group, FORMAT: gl.constexpr):
    """Where the scale of a group of x stands, in bytes; what else, behind it."""
    PER_STEP: gl.constexpr = 256 // group_of(FORMAT)
    step = group // PER_STEP * step_of_sums(FORMAT)
    j = group % PER_STEP
    if is_four_bits(FORMAT):
        c, quarter, _, second = place_of_four_bits(j, 0 * j, FORMAT)
        return step + c * 16 + quarter * 4 + second * 4
    elif FORMAT == "Q6_K":  # four scales a lane, and behind those of the step four sums
        return step + j % 4 * 16 + j // 4 * 4
    elif FORMAT == "Q8_0":
        return step + j % 4 * 8 + j // 4 * 4
    else:  # two scales and two sums a lane
        return step + j // 2 * 16 + j % 2 * 4


@gluon_jit
def read_lane(at, g, c, FORMAT: gl.constexpr):
    """All words of a lane of one step, from shared memory."""
    if is_four_bits(FORMAT):
        return read_four_bits(at, g, c, FORMAT)
    else:
        return read_blocks(at, g, c, FORMAT)


@gluon_jit
def read_blocks(at, g, c, FORMAT: gl.constexpr):
    words = ()
    if FORMAT == "Q8_0":
        first = at + 544 * c + 8 * g
        for half in gl.static_range(2):
            for w in gl.static_range(8):
                words += (shared_pair(first, half * 2176 + 32 + 64 * w),)
        for half in gl.static_range(2):
            words += (shared_word(at + 544 * c + 4 * g, half * 2176),)
    elif FORMAT == "Q6_K":
        low = at + 256 * c + 8 * g
        high = at + 2048 + 256 * (c % 2) + 8 * g
        for half in gl.static_range(2):
            for w in gl.static_range(4):
                words += (word_of(low, c, w, half * 1024),)
            for w in gl.static_range(4):
                words += (word_of(high, c, w, half * 512),)
        for i in gl.static_range(4):
            words += (shared_pair(at + 8 * g, 3072 + 64 * i),)
        words += (shared_word(at + 4 * g, 3328),)
    else:
        first: gl.constexpr = 768 if FORMAT == "Q5_K" else 256
        codes = at + 512 * c + 8 * g
        for w in gl.static_range(8):
            words += (word_of(codes, c, w, first),)
        if FORMAT == "Q5_K":
            for w in gl.static_range(8):
                words += (word_of(at + 8 * g, c, w, 256),)
        for i in gl.static_range(4):
            words += (shared_pair(at + 8 * g, 64 * i),)
    return words


@gluon_jit
def add_lane(words, c, x, kept, totals, nothing, FORMAT: gl.constexpr):
    """totals + the products of one step, of either row.

    `nothing` is a zero that no compiler knows.
    """
    if FORMAT == "Q8_0":
        return add_q8_0(words, x, kept, totals)
    elif FORMAT == "Q6_K":
        return add_q6_k(words, c, x, kept, totals)
    elif is_four_bits(FORMAT):
        return add_four_bits(words, x, kept, totals, nothing, FORMAT)
    else:
        return add_with_minima(words, c, x, kept, totals, FORMAT)


@gluon_jit
def add_q8_0(words, x, kept, totals):
    zero = x * 0
    t0, t1 = totals
    near = (zero, zero, zero, zero)
    far = near
    for quarter in gl.static_range(4):
        b = four_words(x, 128 * quarter)
        first = rows_of(words[2 * quarter])
        second = rows_of(words[2 * quarter + 1])
        a = (first[0], first[1], second[0], second[1])
        near = add_products(a, b[0], b[1], near, True)
        first = rows_of(words[8 + 2 * quarter])
        second = rows_of(words[9 + 2 * quarter])
        a = (first[0], first[1], second[0], second[1])
        far = add_products(a, b[2], b[3], far, True)
    scales = rows_of(shared_pair(kept, 0))
    for half in gl.static_range(2):
        d = words[16 + half]
        s0, s1 = of_digits(near if half == 0 else far)
        scale = as_float(scales[half])
        t0 = gl.fma(float_of_half(d) * scale, s0, t0)
        t1 = gl.fma(float_of_half(d >> 16) * scale, s1, t1)
    return t0, t1


@gluon_jit
def six_bits(low, high, SECOND: gl.constexpr):
    """Four bits of `low` and two of `high`: its bits 0 and 1, or 4 and 5."""
    if SECOND:
        return ((low >> 4) & 0x0F0F0F0F) | (high & 0x30303030)
    else:
        return (low & 0x0F0F0F0F) | ((high << 4) & 0x30303030)


@gluon_jit
def add_q6_k(words, c, x, kept, totals):
    t0, t1 = totals
    selection = 0x7540 + c
    d = words[20]
    d0, d1 = float_of_half(d), float_of_half(d >> 16)
    scales = four_words(kept, 0)
    starts = four_words(kept, 64)
    zero = x * 0
    for half in gl.static_range(2):
        near = (zero, starts[2 * half], zero, starts[2 * half])
        far = (zero, starts[2 * half + 1], zero, starts[2 * half + 1])
        for pair in gl.static_range(2):
            b = four_words(x, 128 * (2 * half + pair))
            first = rows_of(words[8 * half + 2 * pair])
            second = rows_of(words[8 * half + 2 * pair + 1])
            high = rows_of(words[8 * half + 2 * pair + 4])
            above = rows_of(words[8 * half + 2 * pair + 5])
            h0, h1 = high[0] >> (c & 2), high[1] >> (c & 2)
            h2, h3 = above[0] >> (c & 2), above[1] >> (c & 2)
            a = (
                six_bits(first[0], h0, False),
                six_bits(first[1], h1, False),
                six_bits(second[0], h2, False),
                six_bits(second[1], h3, False),
            )
            near = add_products(a, b[0], b[1], near, False)
            a = (
                six_bits(first[0], h0, True),
                six_bits(first[1], h1, True),
                six_bits(second[0], h2, True),
                six_bits(second[1], h3, True),
            )
            far = add_products(a, b[2], b[3], far, False)
        for which in gl.static_range(2):
            s = rows_of(words[16 + 2 * half + which] ^ -0x7F7F7F7F7F7F7F80)
            s0, s1 = of_digits(near if which == 0 else far)
            scale = as_float(scales[2 * half + which])
            t0 = gl.fma((picked(s[0], selection) - 8388736.0) * scale * d0, s0, t0)
            t1 = gl.fma((picked(s[1], selection) - 8388736.0) * scale * d1, s1, t1)
    return t0, t1


@gluon_jit
def fifth_bit(word, high, SECOND: gl.constexpr):
    """Four bits of `word`, with bit 0 or 1 of the bytes of `high` above."""
    if SECOND:
        return ((word >> 4) & 0x0F0F0F0F) | ((high << 3) & 0x10101010)
    else:
        return (word & 0x0F0F0F0F) | ((high << 4) & 0x10101010)


@gluon_jit
def codes_with_minima(
    words, c, AT: gl.constexpr, SECOND: gl.constexpr, FORMAT: gl.constexpr
):
    """Four codes of either row in the bytes of a word, of the first or second group."""
    word = rows_of(words[AT])
    if FORMAT == "Q5_K":
        high = rows_of(words[8 + AT])
        return (
            fifth_bit(word[0], high[0] >> (2 * c), SECOND),
            fifth_bit(word[1], high[1] >> (2 * c), SECOND),
        )
    elif SECOND:
        return (word[0] >> 4) & 0x0F0F0F0F, (word[1] >> 4) & 0x0F0F0F0F
    else:
        return word[0] & 0x0F0F0F0F, word[1] & 0x0F0F0F0F


@gluon_jit
def six_bits_of_lane(word, rest, c):
    """The scales, or minima, of the half of the groups in which a lane has its own."""
    near = word & 0x3F3F3F3F
    far = (rest & 0x0F0F0F0F) | ((word >> 2) & 0x30303030)
    return gl.where(c < 2, near, far)


@gluon_jit
def add_with_minima(words, c, x, kept, totals, FORMAT: gl.constexpr):
    LAST: gl.constexpr = 16 if FORMAT == "Q5_K" else 8
    zero = x * 0
    near = (zero, zero, zero, zero)
    far = near
    for quarter in gl.static_range(4):
        b = four_words(x, 128 * quarter)
        p0, p1 = codes_with_minima(words, c, 2 * quarter, False, FORMAT)
        p2, p3 = codes_with_minima(words, c, 2 * quarter + 1, False, FORMAT)
        near = add_products((p0, p1, p2, p3), b[0], b[1], near, False)
        p0, p1 = codes_with_minima(words, c, 2 * quarter, True, FORMAT)
        p2, p3 = codes_with_minima(words, c, 2 * quarter + 1, True, FORMAT)
        far = add_products((p0, p1, p2, p3), b[2], b[3], far, False)
    of_x = four_words(kept, 0)
    d = rows_of(words[LAST])
    s = rows_of(words[LAST + 1])
    m = rows_of(words[LAST + 2])
    rest = rows_of(words[LAST + 3])
    selection = 0x7540 + c % 2 * 2
    near_sums = of_digits(near)
    far_sums = of_digits(far)
    found = ()
    for r in gl.static_range(2):
        scales = six_bits_of_lane(s[r], rest[r], c)
        minima = six_bits_of_lane(m[r], rest[r] >> 4, c)
        big = float_of_half(d[r])
        least = float_of_half(d[r] >> 16)
        s0 = (picked(scales, selection) - 8388608.0) * as_float(of_x[0])
        s1 = (picked(scales, selection + 1) - 8388608.0) * as_float(of_x[1])
        m0 = (picked(minima, selection) - 8388608.0) * as_float(of_x[2])
        m1 = (picked(minima, selection + 1) - 8388608.0) * as_float(of_x[3])
        of_codes = gl.fma(s0, near_sums[r], s1 * far_sums[r])
        found += (gl.fma(big, of_codes, gl.fma(-least, m0 + m1, totals[r])),)
    return found
