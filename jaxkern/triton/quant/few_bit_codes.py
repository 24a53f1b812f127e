"""Codes of 2 and 3 bits and their scales, Q2_K and Q3_K: see block_codes.

Q2_K   scales[16] qs[64] d dmin                16 scales and minima of 4 bits
Q3_K   hmask[32] qs[64] scales[12] d           16 scales of 6 bits
"""

from jaxkern.gpu.triton_call import gl, gluon_jit
from jaxkern.triton.quant.fragments import (
    byte_as_float,
    float_of_half,
    rows_of,
    times_byte,
)


@gluon_jit
def read_few_bits(block, g, c, FORMAT: gl.constexpr):
    """Scales, d; low bits of codes; of Q3_K the highest bits."""
    SCALES: gl.constexpr = 0 if FORMAT == "Q2_K" else 24
    CODES: gl.constexpr = 4 if FORMAT == "Q2_K" else 8
    words = ()
    for i in gl.static_range(3):
        words += (gl.load(block + g + 8 * (SCALES + i)),)
    if FORMAT == "Q2_K":
        words += (gl.load(block + g + 8 * 3), gl.load(block + g + 8 * 20))
    else:
        halves = (block + 8 * 27).to(gl.pointer_type(gl.int32), bitcast=True) + g
        words += (gl.load(halves), gl.load(halves))
    for i in gl.static_range(4):
        at = block + g + 8 * c + 8 * (CODES + 4 * i)
        words += (gl.load(at, eviction_policy="evict_first"),)
    if FORMAT == "Q3_K":
        for i in gl.static_range(2):
            at = block + g + 8 * c + 32 * i
            words += (gl.load(at, eviction_policy="evict_first"),)
    return words


@gluon_jit
def codes_few_bits(words, F: gl.constexpr, FORMAT: gl.constexpr):
    low = rows_of(words[5 + F // 8 * 2 + F % 2])
    first = (low[0] >> (2 * (F // 2 % 4))) & 0x03030303
    second = (low[1] >> (2 * (F // 2 % 4))) & 0x03030303
    if FORMAT == "Q3_K":
        high = rows_of(words[9 + F % 2])
        first = first | (((high[0] >> (F // 2)) & 0x01010101) << 2)
        second = second | (((high[1] >> (F // 2)) & 0x01010101) << 2)
    return first, second


@gluon_jit
def scales_few_bits(words, J: gl.constexpr, FORMAT: gl.constexpr):
    if FORMAT == "Q2_K":
        s = rows_of(words[J // 4])
        d = rows_of(words[4])
        return (
            times_byte(float_of_half(d[0]), s[0] & 0x0F0F0F0F, J % 4),
            times_byte(float_of_half(d[1]), s[1] & 0x0F0F0F0F, J % 4),
            times_byte(-float_of_half(d[0] >> 16), (s[0] >> 4) & 0x0F0F0F0F, J % 4),
            times_byte(-float_of_half(d[1] >> 16), (s[1] >> 4) & 0x0F0F0F0F, J % 4),
        )
    else:
        low = rows_of(words[J % 8 // 4])
        high = rows_of(words[2])
        d = (words[3], words[3] >> 16)
        scales = ()
        for r in gl.static_range(2):
            s = (low[r] >> (4 * (J // 8))) & 0x0F0F0F0F
            s = s | (((high[r] >> (2 * (J // 4))) & 0x03030303) << 4)
            # 2**23 + s, less 2**23 + 32
            scales += (float_of_half(d[r]) * (byte_as_float(s, J % 4) - 8388640.0),)
        return scales
