"""Codes and scales of blocks, as the lanes of a warp read them from 16 rows.

A warp reads one step of 256 columns of a tile of 16 rows, `InterleavedTensor`: lane
4 g + c has rows 2 g and 2 g + 1, and of every 16 columns, a fragment, the four from 4 c
on. So each read is 64 bits wide, those of a warp are side by side, and what a lane
unpacks is what the matrix instruction wants in its registers.

    w = scale * (code - zero) + offset

Codes are bytes: unsigned and below 128, or signed. Up to eight fragments share a scale.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.primitives.quant.tile_formats import OWN_FORMATS
from jaxkern.triton.quant.few_bit_codes import (
    codes_few_bits,
    read_few_bits,
    scales_few_bits,
)
from jaxkern.triton.quant.four_bit_codes import (
    codes_grouped,
    codes_nvfp4,
    columns_of_group,
    is_grouped,
    is_nvfp4,
    read_grouped,
    read_nvfp4,
    scales_grouped,
    scales_nvfp4,
)
from jaxkern.triton.quant.fragments import (
    byte_as_float,
    float_of_half,
    rows_of,
    times_byte,
)
from jaxkern.triton.quant.row_fours import codes_by_rows, is_by_rows, scales_by_rows
from jaxkern.triton.quant.table_codes import (
    codes_iq4_xs,
    look_up,
    look_up_e2m1,
    read_iq4_xs,
    scale_of_power,
    scales_iq4_xs,
    starts_of_tables,
)

# Of the formats of 32 columns: has offsets, has fifth bits, has codes of 8 bits.
SMALL = {
    "Q4_0": (False, False, False),
    "Q4_1": (True, False, False),
    "Q5_0": (False, True, False),
    "Q5_1": (True, True, False),
    "Q8_0": (False, False, True),
    "IQ4_NL": (False, False, False),
    "MXFP4": (False, False, False),
}
BYTES = {
    **{"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34},
    **{"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q2_K": 84, "Q3_K": 110},
    **{"IQ4_NL": 18, "IQ4_XS": 136, "MXFP4": 17},
    **{q: form.bytes for q, form in OWN_FORMATS.items()},
}
ZERO = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32, "Q3_K": 4, "MXFP4": 12, "NVFP4_256": 12}
ZERO |= {"MXFP4_ROWS": 12}  # row_fours.py
NO_OFFSETS = (
    "Q6_K",
    "Q3_K",
    "IQ4_XS",
    "NVFP4_256",
    "MXFP4_ROWS",
)  # but those of 32 columns
STEP = 256  # columns


@constexpr_function
def is_small(FORMAT):
    return FORMAT in SMALL


@constexpr_function
def has_offsets(FORMAT):
    return SMALL[FORMAT][0] if FORMAT in SMALL else FORMAT not in NO_OFFSETS


@constexpr_function
def has_fifth_bits(FORMAT):
    return SMALL[FORMAT][1] if FORMAT in SMALL else FORMAT == "Q5_K"


@constexpr_function
def is_signed(FORMAT):
    return FORMAT in ("Q8_0", "IQ4_NL", "IQ4_XS")


@constexpr_function
def is_few_bits(FORMAT):
    return FORMAT in ("Q2_K", "Q3_K")


@constexpr_function
def is_table(FORMAT):
    """A code is the place of a number in a table."""
    return FORMAT in ("IQ4_NL", "IQ4_XS", "MXFP4")


@constexpr_function
def is_power_of_two(FORMAT):
    """Whether each scale is one, and nothing is added."""
    return FORMAT in ("MXFP4", "MXFP4_ROWS")


@constexpr_function
def zero_of(FORMAT):
    return ZERO[FORMAT] if FORMAT in ZERO else 0


@constexpr_function
def middle_of(FORMAT):
    """A code about which the codes lie: the zero, or half of the largest and one."""
    if has_offsets(FORMAT):
        return {"Q5": 16, "Q2": 2}.get(FORMAT[:2], 8)
    return zero_of(FORMAT)


@constexpr_function
def fragments_of_scale(FORMAT):
    if is_grouped(FORMAT):
        return columns_of_group(FORMAT) // 16
    if is_by_rows(FORMAT):
        return 8
    return 1 if FORMAT in ("Q6_K", "Q2_K", "Q3_K", "NVFP4_256") else 2


@constexpr_function
def pairs_of_block(FORMAT):
    """Words of 64 bits of one block of 16 rows."""
    return BYTES[FORMAT] * 2


@constexpr_function
def words_of_block(FORMAT):
    """How many a lane reads of a block of 32 columns; places of fifth bits, codes."""
    offsets, fifth, eight = SMALL[FORMAT]
    return 2 + offsets + fifth + eight, 1 + offsets, 1 + offsets + fifth


@constexpr_function
def has_eight_bits(FORMAT):
    return SMALL[FORMAT][2]


@gluon_jit
def read(at, OFFSET: gl.constexpr):
    return gl.load(at + OFFSET, eviction_policy="evict_first")


@gluon_jit
def read_step(tile, g, c, step, NUM_BLOCKS: gl.constexpr, FORMAT: gl.constexpr):
    """All words of a lane of one step, before any of them is used."""
    if is_small(FORMAT):
        return read_small(tile, g, c, step, NUM_BLOCKS, FORMAT)
    elif FORMAT == "Q6_K":
        return read_q6_k(tile, g, c, step, NUM_BLOCKS)
    elif is_few_bits(FORMAT):
        block = tile + gl.minimum(step, NUM_BLOCKS - 1) * pairs_of_block(FORMAT)
        return read_few_bits(block, g, c, FORMAT)
    elif FORMAT == "IQ4_XS":
        block = tile + gl.minimum(step, NUM_BLOCKS - 1) * pairs_of_block(FORMAT)
        return read_iq4_xs(block, g, c)
    elif is_grouped(FORMAT):
        return read_grouped(tile, g, c, step, NUM_BLOCKS, FORMAT)
    elif is_nvfp4(FORMAT):
        block = tile + gl.minimum(step, NUM_BLOCKS - 1) * pairs_of_block(FORMAT)
        return read_nvfp4(block, g, c)
    else:
        return read_with_minima(tile, g, c, step, NUM_BLOCKS, FORMAT)


@gluon_jit
def codes_of(words, c, nothing, F: gl.constexpr, FORMAT: gl.constexpr):
    """Four codes of fragment F of either row, in the bytes of a word each.

    `nothing` is a zero that no compiler knows, or any.
    """
    if is_small(FORMAT):
        return codes_small(words, c, nothing, F, FORMAT)
    elif FORMAT == "Q6_K":
        return codes_q6_k(words, F)
    elif is_few_bits(FORMAT):
        return codes_few_bits(words, F, FORMAT)
    elif FORMAT == "IQ4_XS":
        return codes_iq4_xs(words, F)
    elif is_grouped(FORMAT):
        return codes_grouped(words, F, FORMAT)
    elif is_nvfp4(FORMAT):
        return codes_nvfp4(words, nothing, F)
    elif is_by_rows(FORMAT):
        return codes_by_rows(words, nothing, F)
    else:
        return codes_with_minima(words, F, FORMAT)


@gluon_jit
def scales_of(words, J: gl.constexpr, FORMAT: gl.constexpr):
    """Scales of the two rows, and their offsets where the format has them."""
    if is_small(FORMAT):
        return scales_small(words, J, FORMAT)
    elif FORMAT == "Q6_K":
        return scales_q6_k(words, J)
    elif is_few_bits(FORMAT):
        return scales_few_bits(words, J, FORMAT)
    elif FORMAT == "IQ4_XS":
        return scales_iq4_xs(words, J)
    elif is_grouped(FORMAT):
        return scales_grouped(words, J, FORMAT)
    elif is_nvfp4(FORMAT):
        return scales_nvfp4(words, J)
    elif is_by_rows(FORMAT):
        return scales_by_rows(words, J)
    else:
        return scales_with_minima(words, J)


@gluon_jit
def read_with_minima(tile, g, c, step, NUM_BLOCKS: gl.constexpr, FORMAT: gl.constexpr):
    """Q4_K: d, dmin; scales and minima of 6 bits; codes. Q5_K: fifth bits before."""
    block = tile + gl.minimum(step, NUM_BLOCKS - 1) * pairs_of_block(FORMAT) + g
    words = ()
    for i in gl.static_range(4):
        words += (read(block, 8 * i),)
    first: gl.constexpr = 96 if FORMAT == "Q5_K" else 32
    for i in gl.static_range(8):
        words += (read(block + 8 * c, first + 32 * i),)
    if FORMAT == "Q5_K":
        for i in gl.static_range(2):
            words += (read(block + 8 * c, 32 + 32 * i),)
    return words


@gluon_jit
def codes_with_minima(words, F: gl.constexpr, FORMAT: gl.constexpr):
    first, second = rows_of(words[4 + F // 4 * 2 + F % 2])
    first = (first >> (4 * (F // 2 % 2))) & 0x0F0F0F0F
    second = (second >> (4 * (F // 2 % 2))) & 0x0F0F0F0F
    if FORMAT == "Q5_K":
        fifth = rows_of(words[12 + F % 2])
        first = first | (((fifth[0] >> (F // 2)) & 0x01010101) << 4)
        second = second | (((fifth[1] >> (F // 2)) & 0x01010101) << 4)
    return first, second


@gluon_jit
def scales_with_minima(words, J: gl.constexpr):
    """d times scale J, and less dmin times minimum J."""
    d = rows_of(words[0])
    s = rows_of(words[1])
    m = rows_of(words[2])
    if J < 4:
        s0, s1 = s[0] & 0x3F3F3F3F, s[1] & 0x3F3F3F3F
        m0, m1 = m[0] & 0x3F3F3F3F, m[1] & 0x3F3F3F3F
    else:
        rest = rows_of(words[3])
        s0 = (rest[0] & 0x0F0F0F0F) | ((s[0] >> 2) & 0x30303030)
        s1 = (rest[1] & 0x0F0F0F0F) | ((s[1] >> 2) & 0x30303030)
        m0 = ((rest[0] >> 4) & 0x0F0F0F0F) | ((m[0] >> 2) & 0x30303030)
        m1 = ((rest[1] >> 4) & 0x0F0F0F0F) | ((m[1] >> 2) & 0x30303030)
    return (
        times_byte(float_of_half(d[0]), s0, J % 4),
        times_byte(float_of_half(d[1]), s1, J % 4),
        times_byte(-float_of_half(d[0] >> 16), m0, J % 4),
        times_byte(-float_of_half(d[1] >> 16), m1, J % 4),
    )


@gluon_jit
def read_q6_k(tile, g, c, step, NUM_BLOCKS: gl.constexpr):
    """Low bits, two columns in a byte; high bits, four; scales of 8 bits; d."""
    block = tile + gl.minimum(step, NUM_BLOCKS - 1) * pairs_of_block("Q6_K")
    words = ()
    for i in gl.static_range(8):
        words += (read(block + g + 8 * c, 32 * i),)
    for i in gl.static_range(4):
        words += (read(block + g + 8 * c, 256 + 32 * i),)
    for i in gl.static_range(4):
        words += (read(block + g, 384 + 8 * i),)
    halves = (block + 416).to(gl.pointer_type(gl.int32), bitcast=True) + g
    words += (read(halves, 0),)
    return words


@gluon_jit
def codes_q6_k(words, F: gl.constexpr):
    m: gl.constexpr = F % 4
    upper: gl.constexpr = F // 4 % 2
    field: gl.constexpr = 2 * (2 * upper + m // 2)
    low = rows_of(words[F // 8 * 4 + m])
    high = rows_of(words[8 + F // 8 * 2 + m % 2])
    first = (low[0] >> (4 * upper)) & 0x0F0F0F0F
    second = (low[1] >> (4 * upper)) & 0x0F0F0F0F
    first = first | (((high[0] >> field) & 0x03030303) << 4)
    second = second | (((high[1] >> field) & 0x03030303) << 4)
    return first, second


@gluon_jit
def scales_q6_k(words, J: gl.constexpr):
    d = words[16]
    s0, s1 = rows_of(words[12 + J // 4] ^ -0x7F7F7F7F7F7F7F80)
    return (
        float_of_half(d) * (byte_as_float(s0, J % 4) - 8388736.0),
        float_of_half(d >> 16) * (byte_as_float(s1, J % 4) - 8388736.0),
    )


@gluon_jit
def read_small(tile, g, c, step, NUM_BLOCKS: gl.constexpr, FORMAT: gl.constexpr):
    """Eight blocks of 32 columns: scale, [offset,] [fifth bits,] codes of each."""
    CODES: gl.constexpr = 8 if has_offsets(FORMAT) else 2 if FORMAT == "MXFP4" else 4
    words = ()
    for j in gl.static_range(8):
        number = gl.minimum(step * 8 + j, NUM_BLOCKS - 1)
        block = tile + number * pairs_of_block(FORMAT)
        if FORMAT == "MXFP4":  # a byte a row
            bytes_ = block.to(gl.pointer_type(gl.int16), bitcast=True) + g
            words += (read(bytes_, 0).to(gl.int32),)
        else:
            halves = block.to(gl.pointer_type(gl.int32), bitcast=True) + g
            words += (read(halves, 0),)
        if has_offsets(FORMAT):
            halves = block.to(gl.pointer_type(gl.int32), bitcast=True) + g
            words += (read(halves, 8),)
        if has_fifth_bits(FORMAT):
            words += (read(block + g, CODES),)
            words += (read(block + g + 8 * c, CODES + 8),)
        else:
            words += (read(block + g + 8 * c, CODES),)
        if has_eight_bits(FORMAT):
            words += (read(block + g + 8 * c, CODES + 32),)
    return words


@gluon_jit
def spread(word, AT: gl.constexpr, c):
    """The four bits from 4 c + AT on as bit 4 of bytes."""
    bits = (word >> (4 * c + AT)) & 15
    return ((bits * 0x00204081) & 0x01010101) << 4


@gluon_jit
def codes_small(words, c, nothing, F: gl.constexpr, FORMAT: gl.constexpr):
    PLACES: gl.constexpr = words_of_block(FORMAT)
    at: gl.constexpr = F // 2 * PLACES[0]
    if has_eight_bits(FORMAT):
        return rows_of(words[at + PLACES[2] + F % 2])
    elif FORMAT == "MXFP4":
        first, second = rows_of(words[at + PLACES[2]])
        starts = starts_of_tables(nothing)
        return look_up_e2m1(first, starts, F % 2), look_up_e2m1(second, starts, F % 2)
    elif is_table(FORMAT):
        first, second = rows_of(words[at + PLACES[2]])
        return look_up(first, F % 2), look_up(second, F % 2)
    else:
        first, second = rows_of(words[at + PLACES[2]])
        first = (first >> (4 * (F % 2))) & 0x0F0F0F0F
        second = (second >> (4 * (F % 2))) & 0x0F0F0F0F
        if has_fifth_bits(FORMAT):
            fifth = rows_of(words[at + PLACES[1]])
            first = first | spread(fifth[0], 16 * (F % 2), c)
            second = second | spread(fifth[1], 16 * (F % 2), c)
        return first, second


@gluon_jit
def scales_small(words, J: gl.constexpr, FORMAT: gl.constexpr):
    PLACES: gl.constexpr = words_of_block(FORMAT)
    d = words[J * PLACES[0]]
    if FORMAT == "MXFP4":
        return scale_of_power(d & 255), scale_of_power((d >> 8) & 255)
    elif has_offsets(FORMAT):
        m = words[J * PLACES[0] + 1]
        return (
            float_of_half(d),
            float_of_half(d >> 16),
            float_of_half(m),
            float_of_half(m >> 16),
        )
    else:
        return float_of_half(d), float_of_half(d >> 16)
