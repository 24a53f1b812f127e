"""Codes of 4 bits with numbers of 16 bits a group, and NVFP4: see block_codes.

AFFINE4_g_t   scale[2] bias[2] qs[g / 2]       w = scale * code + bias
INT4_g_t      scale[2] zero[2] qs[g / 2]       w = (code - zero) * scale
NVFP4_256     d[4] scales[16] qs[128]          w = element * e4m3 scale * d

Blocks of g columns, 32, 64 or 128, a step has 256 / g; t is the dtype of both numbers.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.fragments import float_of_half, rows_of
from jaxkern.triton.quant.table_codes import look_up_e2m1, starts_of_tables


@constexpr_function
def is_grouped(FORMAT):
    return FORMAT.startswith(("AFFINE4_", "INT4_"))


@constexpr_function
def is_nvfp4(FORMAT):
    return FORMAT == "NVFP4_256"


@constexpr_function
def columns_of_group(FORMAT):
    return int(FORMAT.split("_")[1])


@constexpr_function
def has_zero_points(FORMAT):
    return FORMAT.startswith("INT4_")


@constexpr_function
def is_bfloat16(FORMAT):
    return FORMAT.endswith("_BF16")


@gluon_jit
def two_numbers_of(word, FORMAT: gl.constexpr):
    """The two of 16 bits in a word."""
    if is_bfloat16(FORMAT):
        return (
            (word << 16).to(gl.float32, bitcast=True),
            (word & -65536).to(gl.float32, bitcast=True),
        )
    else:
        return float_of_half(word), float_of_half(word >> 16)


@gluon_jit
def scale_and_offset(word, FORMAT: gl.constexpr):
    """w = scale * code + offset"""
    scale, other = two_numbers_of(word, FORMAT)
    if has_zero_points(FORMAT):
        return scale, -other * scale
    else:
        return scale, other


@gluon_jit
def read_grouped(tile, g, c, step, NUM_BLOCKS: gl.constexpr, FORMAT: gl.constexpr):
    """Of each block of a step the numbers, then a word of every 32 columns."""
    GROUP: gl.constexpr = columns_of_group(FORMAT)
    PAIRS: gl.constexpr = 8 + GROUP  # words of 64 bits of 16 rows
    words = ()
    for j in gl.static_range(256 // GROUP):
        number = gl.minimum(step * (256 // GROUP) + j, NUM_BLOCKS - 1)
        block = tile + number * PAIRS + g
        words += (gl.load(block, eviction_policy="evict_first"),)
        for i in gl.static_range(GROUP // 32):
            at = block + 8 * c + (8 + 32 * i)
            words += (gl.load(at, eviction_policy="evict_first"),)
    return words


@gluon_jit
def codes_grouped(words, F: gl.constexpr, FORMAT: gl.constexpr):
    EACH: gl.constexpr = columns_of_group(FORMAT) // 32
    first, second = rows_of(words[F // 2 // EACH * (1 + EACH) + 1 + F // 2 % EACH])
    first = (first >> (4 * (F % 2))) & 0x0F0F0F0F
    second = (second >> (4 * (F % 2))) & 0x0F0F0F0F
    return first, second


@gluon_jit
def scales_grouped(words, J: gl.constexpr, FORMAT: gl.constexpr):
    EACH: gl.constexpr = columns_of_group(FORMAT) // 32
    first, second = rows_of(words[J * (1 + EACH)])
    s0, m0 = scale_and_offset(first, FORMAT)
    s1, m1 = scale_and_offset(second, FORMAT)
    return s0, s1, m0, m1


@gluon_jit
def read_nvfp4(block, g, c):
    """d; scales, four in a word; codes."""
    words = ()
    for i in gl.static_range(5):
        words += (gl.load(block + g + 8 * i),)
    for i in gl.static_range(8):
        at = block + g + 8 * c + (40 + 32 * i)
        words += (gl.load(at, eviction_policy="evict_first"),)
    return words


@gluon_jit
def codes_nvfp4(words, nothing, F: gl.constexpr):
    first, second = rows_of(words[5 + F // 2])
    starts = starts_of_tables(nothing)
    return look_up_e2m1(first, starts, F % 2), look_up_e2m1(second, starts, F % 2)


@gluon_jit
def half_of_e4m3(word, AT: gl.constexpr):
    """Half of the number that byte AT of a word is: the codes are doubled."""
    top = (word << (24 - 8 * AT)) >> 4  # its sign, then the others at their places
    number = (top & -0x78100000).to(gl.float32, bitcast=True)
    nan = (top & 0x07F00000) == 0x07F00000
    return gl.where(nan, float("nan"), number * 2.0**119)


@gluon_jit
def scales_nvfp4(words, J: gl.constexpr):
    d = rows_of(words[0])
    s = rows_of(words[1 + J // 4])
    return (
        d[0].to(gl.float32, bitcast=True) * half_of_e4m3(s[0], J % 4),
        d[1].to(gl.float32, bitcast=True) * half_of_e4m3(s[1], J % 4),
    )
