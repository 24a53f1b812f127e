"""Codes and scales of row-major containers, as the lanes of a warp read them.

A warp reads steps of 16 rows: lane 4 g + c has rows g and g + 8, and of either a unit
of neighbouring columns, 16 bytes where codes have 2, 4 or 8 bits. What it unpacks is
what the matrix instruction wants in its registers, because neither the order of rows
nor that of the terms of a sum matters if activations follow it.

    w = scale * (code - zero) + offset

| format | code | as bfloat16 |
|---|---|---|
| u2 to u6 | unsigned, a stream of bits | 128 + code |
| i4 | two's complement | 136 + code |
| u8 | unsigned | code - 128 |
| i8 | two's complement | code |
| e4m3 | small float | its value |
| e2m1 | small float | 70 + its value |
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit

BITS = {"u2": 2, "u3": 3, "u4": 4, "u5": 5, "u6": 6}
BITS |= {"i4": 4, "e2m1": 4, "u8": 8, "i8": 8, "e4m3": 8}
UNITS = {2: 64, 3: 32, 4: 32, 5: 32, 6: 32, 8: 16}  # columns of a lane, by bits
# what the bfloat16 of a code is more than the code
EXCESS = {"i4": 136, "u8": -128, "i8": 0, "e4m3": 0, "e2m1": 70}


@constexpr_function
def bits_of(FORMAT):
    return BITS[FORMAT]


@constexpr_function
def words_of_unit(FORMAT):
    return UNITS[BITS[FORMAT]] * BITS[FORMAT] // 32


@constexpr_function
def has_nan(FORMAT):
    return FORMAT == "e4m3"


@constexpr_function
def load_text(WORDS, OFFSET):
    """Loads of 16, 8 or 4 bytes; what shares a sector stays in the cache till then."""
    wide = 4 if WORDS % 4 == 0 else 2 if WORDS % 2 == 0 else 1
    policy = "L1::no_allocate" if WORDS == 4 else "L1::evict_first"
    text = ""
    for first in range(0, WORDS, wide):
        at = f"[${WORDS}+{OFFSET + 4 * first}];"
        names = ", ".join(f"${first + i}" for i in range(wide))
        if wide == 1:
            text += f"ld.global.{policy}.b32 {names}, {at} "
        else:
            text += f"ld.global.{policy}.v{wide}.b32 {{{names}}}, {at} "
    return text


@constexpr_function
def load_constraints(WORDS):
    return ",".join(["=&r"] * WORDS + ["l"])


@constexpr_function
def words_types(WORDS):
    return (gl.int32,) * WORDS


@gluon_jit
def read_unit(at, OFFSET: gl.constexpr, FORMAT: gl.constexpr):
    """The words of a lane's unit of one row, bytes behind `at`; not moved or joined."""
    return gl.inline_asm_elementwise(
        load_text(words_of_unit(FORMAT), OFFSET),
        load_constraints(words_of_unit(FORMAT)),
        [at],
        words_types(words_of_unit(FORMAT)),
        False,
        1,
    )


@constexpr_function
def x_text(OFFSET):
    return f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{OFFSET}];"


@gluon_jit
def read_x(at, OFFSET: gl.constexpr):
    """Eight columns of activations at an address."""
    return gl.inline_asm_elementwise(
        x_text(OFFSET),
        "=r,=r,=r,=r,l",
        [at],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        False,
        1,
    )


@gluon_jit
def halves_of(first, second, UPPER: gl.constexpr):
    """The lower, or the upper, halves of two words in one."""
    if UPPER:
        return gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [first, second], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second], gl.int32, True, 1
        )


@gluon_jit
def pair_of_x(x, P: gl.constexpr, FORMAT: gl.constexpr):
    """The activations of pair P of a unit, x being its columns in their order.

    Codes of 2 and 4 bits come two from the two halves of a word, 8 and 4 columns apart.
    """
    BITS: gl.constexpr = bits_of(FORMAT)
    if (BITS == 2 or BITS == 4) and FORMAT != "e2m1":
        APART: gl.constexpr = 8 // BITS  # words of x
        word: gl.constexpr = P // (2 * APART) * (2 * APART) + P % (2 * APART) // 2
        return halves_of(x[word], x[word + APART], P % 2 == 1)
    else:
        return x[P]


@gluon_jit
def bits_from(words, BIT: gl.constexpr, BITS: gl.constexpr):
    """Bits of a stream from BIT on, in the lowest places; others stand above them."""
    if BIT % 32 + BITS > 32:
        return gl.inline_asm_elementwise(
            shift_text(BIT % 32),
            "=r,r,r",
            [words[BIT // 32], words[BIT // 32 + 1]],
            gl.int32,
            True,
            1,
        )
    else:
        return words[BIT // 32] >> (BIT % 32)


@constexpr_function
def shift_text(BY):
    return f"shf.r.wrap.b32 $0, $1, $2, {BY};"


@constexpr_function
def spread_text(UPPER):
    selection = 0x3424 if UPPER else 0x1404
    return f"prmt.b32 $0, $1, 0, {selection:#x};"


@constexpr_function
def numbers_of(FORMAT):
    """What stays in registers: an instruction has room for one number of its own.

    Of e2m1 bytes 12 + and 12 - a doubled code, eight each.
    """
    if FORMAT == "e2m1":
        doubled = (0, 1, 2, 3, 4, 6, 8, 12)
        table = [12 + v for v in doubled] + [12 - v for v in doubled]
        words = (table[at : at + 4] for at in range(0, 16, 4))
        chosen_from = (sum(v << 8 * i for i, v in enumerate(word)) for word in words)
        return (*chosen_from, 0x42424242)
    if FORMAT == "e4m3":
        return (0x07F007F0, power_of_two(120), -0x7FFF8000)
    if FORMAT in ("i8", "u8"):
        return (0x43434343, -0x407F4080)  # and -1, twice, as bfloat16
    return (0x43084308 if FORMAT == "i4" else 0x43004300,)


@constexpr_function
def power_of_two(EXPONENT):
    """Twice, as bfloat16."""
    half = (EXPONENT + 127) << 7
    return half << 16 | half


@gluon_jit
def in_registers(nothing, FORMAT: gl.constexpr):
    """The numbers that unpacking needs; `nothing` is a zero that no compiler sees."""
    NUMBERS: gl.constexpr = numbers_of(FORMAT)
    found = ()
    for i in gl.static_range(len(NUMBERS)):
        found += (nothing + NUMBERS[i],)
    return found


@gluon_jit
def chosen(fields, low, high):
    """Bytes of eight, by four fields of 4 bits; 0 where a field's highest bit is set.

    It asks for the highest bit of a byte, which none of them has.
    """
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, fields], gl.int32, True, 1
    )


@gluon_jit
def under(word, high, LAST: gl.constexpr):
    """Bytes 0 and 1, or 2 and 3, of a word, under the byte of which `high` is four."""
    if LAST:
        return gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x4342;", "=r,r,r", [word, high], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x4140;", "=r,r,r", [word, high], gl.int32, True, 1
        )


@constexpr_function
def masked_text(MASK):
    return f"lop3.b32 $0, $1, {MASK:#x}, $2, 0x6a;"


@gluon_jit
def masked(word, number, MASK: gl.constexpr):
    """(word & MASK) ^ number"""
    return gl.inline_asm_elementwise(
        masked_text(MASK), "=r,r,r", [word, number], gl.int32, True, 1
    )


@gluon_jit
def times(pair, factor, addend):
    """Two bfloat16 by others and more; numbers below the normal ones are exact too."""
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pair, factor, addend],
        gl.int32,
        True,
        1,
    )


@gluon_jit
def pair_of_codes(words, numbers, P: gl.constexpr, FORMAT: gl.constexpr):
    """Two codes of a lane's unit as bfloat16 in a word."""
    BITS: gl.constexpr = bits_of(FORMAT)
    if BITS == 8 and FORMAT != "e4m3":  # (128 + low bits) - (128 or 256)
        word = words[P // 2]
        if FORMAT == "u8":
            word = word ^ -0x7F7F7F80
        low = under(word & 0x7F7F7F7F, numbers[0], P % 2 == 1)
        return times(under(word & -0x7F7F7F80, numbers[0], P % 2 == 1), numbers[1], low)
    elif FORMAT == "e4m3":  # sign, 4 bits of exponent, 3 of mantissa; 2**-120 times it
        high = gl.inline_asm_elementwise(
            spread_text(P % 2 == 1), "=r,r", [words[P // 2]], gl.int32, True, 1
        )
        pair = ((high >> 4) & numbers[0]) | (high & -0x7FFF8000)
        return times(pair, numbers[1], numbers[2])
    elif FORMAT == "e2m1":  # a doubled code is a whole number, 128 + 12 + it is read
        word = words[P // 4] >> (16 * (P % 4 // 2))
        plus = chosen(word, numbers[0], numbers[1])
        code = plus | chosen(word ^ 0x8888, numbers[2], numbers[3]) | -0x7F7F7F80
        return under(code, numbers[4], P % 2 == 1)
    elif FORMAT == "i4":
        return masked(words[P // 4] >> (4 * (P % 4)), numbers[0], 0x000F000F)
    elif BITS == 2 or BITS == 4:
        MASK: gl.constexpr = 0x00030003 if BITS == 2 else 0x000F000F
        PAIRS: gl.constexpr = 16 // BITS  # of a word
        return masked(words[P // PAIRS] >> (BITS * (P % PAIRS)), numbers[0], MASK)
    else:
        FIELD: gl.constexpr = (1 << BITS) - 1
        low = masked(bits_from(words, 2 * P * BITS, BITS), numbers[0], FIELD)
        high = bits_from(words, (2 * P + 1) * BITS, BITS) << 16
        return masked(high, low, FIELD << 16)


@gluon_jit
def codes_of_fragment(first, second, numbers, F: gl.constexpr, FORMAT: gl.constexpr):
    """The weights' operand of a matrix instruction: four columns of either row."""
    return (
        pair_of_codes(first, numbers, 2 * F, FORMAT),
        pair_of_codes(second, numbers, 2 * F, FORMAT),
        pair_of_codes(first, numbers, 2 * F + 1, FORMAT),
        pair_of_codes(second, numbers, 2 * F + 1, FORMAT),
    )


@gluon_jit
def nan_codes(words, found):
    """`found` with bit 7 of a byte set where a word of e4m3 has a NaN, 0x7F or 0xFF."""
    for i in gl.static_range(len(words)):
        found = found | ((words[i] & 0x7F7F7F7F) + 0x01010101)
    return found


@gluon_jit
def scale_as_float(scale, KIND: gl.constexpr):
    """A scale in float32 of a float, or of a byte of e8m0 or e4m3."""
    if KIND == "e8m0":  # 2**(byte - 127), 255 is NaN
        byte = scale.to(gl.int32)
        word = gl.where(byte == 0, 1 << 22, byte << 23)
        word = gl.where(byte == 255, 0x7FC00000, word)
        return word.to(gl.float32, bitcast=True)
    elif KIND == "e4m3":
        byte = scale.to(gl.int32)
        size = ((byte & 127) << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36
        size = gl.where((byte & 127) == 127, float("nan"), size)
        return gl.where(byte >= 128, -size, size)
    else:
        return scale.to(gl.float32)
