"""PTX that decodes codes to float16 levels, as the registers of tensor cores want them.

A word has 32 bits of neighbouring codes. Of keys a register holds two dims of a token;
of values it holds two tokens for a dim, whose codes are brought together first.
"""

from jaxkern.gpu.triton_call import constexpr_function
from jaxkern.triton.attention.quantized_cache_attention.layouts import Format, planes_of

# An entry has four bytes for each lane and leaves as many to another table, so that its
# address is a code as the second byte: one instruction.
ENTRY_BYTES = 256
INT8 = Format(8, 0, 0)  # code - 128
INT4 = Format(4, 0, 0)  # code - 8
FLOAT8 = Format(8, 0, -1)  # the bits of an e4m3fn float


@constexpr_function
def registers(KIND, COUNT, INPUTS):
    return ",".join([f"=&{KIND}"] * COUNT + ["r"] * INPUTS)


REGISTERS = """{ .reg .b16 l, h; .reg .b32 a, b, c, d, e, s, t, u;
    mov.b32 c, 0x64086408; mov.b32 d, 0x2c002c00; mov.b32 e, 0xd480d480; """


@constexpr_function
def pair(i):
    """Operands 2 i and 2 i + 1 of inline PTX, two of 16 bits in one of 32."""
    return f"{{${2 * i}, ${2 * i + 1}}}"


@constexpr_function
def int4_levels(word, first):
    """Of the first four codes of each half of a word: 1024 + code, 64 + code."""
    text = ""
    for i in (0, 2):
        source = word if i == 0 else "s"
        text += f"""
            lop3.b32 a, {source}, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, {source}, 0x00f000f0, 0x64006400, 0xea;
            sub.f16x2 a, a, c; fma.rn.f16x2 b, b, d, e;
            mov.b32 {pair(first + i)}, a; mov.b32 {pair(first + i + 1)}, b;"""
    return f"shr.u32 s, {word}, 8;" + text


@constexpr_function
def int8_levels(word, first):
    """1024 + code has the code in its last bits."""
    return f"""
        prmt.b32 a, {word}, 0x64646464, 0x4140; prmt.b32 b, {word}, 0x64646464, 0x4342;
        mov.b32 s, 0x64806480; sub.f16x2 a, a, s; sub.f16x2 b, b, s;
        mov.b32 {pair(first)}, a; mov.b32 {pair(first + 1)}, b;"""


@constexpr_function
def float8_levels(word, first):
    return f"""
        mov.b32 {{l, h}}, {word};
        cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
        mov.b32 {pair(first)}, a; mov.b32 {pair(first + 1)}, b;"""


@constexpr_function
def spread_fields(plane, width, odd, place):
    """PTX: the even or the odd of eight fields of 1 or 2 bits at `place` of bytes in a.

    One product has each field where it belongs. What else it has lies in between, from
    where no carry gets there.
    """
    if width == 2:  # each byte has four of them, which go to two
        text = f"prmt.b32 b, {plane}, 0, 0x4140;"
        plane, mask, factor = "b", 0x330033, 0x11
    else:
        text, mask, factor = "", 0x55, 0x41041
    first = width * odd
    fields = ((1 << width) - 1) * 0x01010101
    return f"""{text} and.b32 b, {plane}, {mask << first};
        mul.lo.u32 b, b, {factor << place >> first};
        lop3.b32 a, b, {fields << place}, a, 0xea;"""


@constexpr_function
def index_bytes(form, word, planes, number):
    """PTX of what four lookups are numbered by, in the bytes of a."""
    width, together = form.width, form.together
    field = width * together
    mask = ((1 << field) - 1) * 0x01010101
    text = f"shr.u32 a, {word}, {field * number};" if number else f"mov.b32 a, {word};"
    text += f"and.b32 a, a, {mask};" if field < 8 else ""
    place = field
    widths = planes_of(form)
    for i in range(len(widths)):
        text += spread_fields(planes[i], widths[i] * together, number, place)
        place += widths[i] * together
    return text


@constexpr_function
def looked_up(form, word, planes, table, out, later):
    """PTX of lookups of all codes of a word; `out(i)` are the results of the i-th.

    Args:
      form, word, table: see the module; `table` is where it begins.
      planes: what the planes behind the main one have for the word, in the low bits.
      later: PTX that sets e to 0 in lanes that have the first quarter of a vector, from
        c, four times their number.
    """
    width, together = form.width, form.together
    steps = 8 // (width * together)
    text = "mov.u32 c, %laneid; shl.b32 c, c, 2;"
    if form.later:
        text += f"{later} min.u32 e, e, 1;"
        text += f"mad.lo.u32 e, e, {form.later * ENTRY_BYTES}, {table};"
        table = "e"
    kind = "b32" if together == 2 else "b16"
    for step in range(steps):
        text += index_bytes(form, word, planes, step)
        for i in range(4):
            text += f"prmt.b32 b, a, c, 0x55{i}4; add.u32 b, b, {table};"
            text += f"ld.shared.{kind} {out(steps * i + step)}, [b];"
    return text


@constexpr_function
def alternating(to, x, y, width, odd):
    """PTX: the even or the odd fields of x and y, beside each other."""
    mask = sum((1 << width) - 1 << 2 * width * i for i in range(16 // width))
    if odd:
        move, x = f"shr.u32 a, {x}, {width};", "a"
    else:
        move, y = f"shl.b32 a, {y}, {width};", "a"
    return f"{move} lop3.b32 {to}, {x}, {y}, {mask:#x}, 0xe4;"


@constexpr_function
def key_levels(FORMAT):
    """PTX of the levels of a word, given the table and words of the other planes."""
    count = 32 // FORMAT.width // max(FORMAT.together, 1)
    word, table, *planes = (f"${count + i}" for i in range(4))
    if FORMAT.width == 16:
        text = f"mov.b32 {pair(0)}, {word};"
    elif FORMAT == INT4:
        text = int4_levels(word, 0)
    elif FORMAT == INT8:
        text = int8_levels(word, 0)
    elif FORMAT == FLOAT8:
        text = float8_levels(word, 0)
    else:
        later = "and.b32 e, c, 12;"
        text = looked_up(FORMAT, word, planes, table, lambda i: f"${i}", later)
    return REGISTERS + text + " }"


@constexpr_function
def value_levels(FORMAT):
    """PTX of the levels of the words of two tokens: of each dim both, together.

    What tokens have for a dim is brought together before it is decoded, not after.
    """
    width, together = FORMAT.width, FORMAT.together
    count = 32 // width
    later = "shr.u32 e, c, 5;"
    results = count if together == 2 else 2 * count
    x, y, table, *planes = (f"${results + i}" for i in range(7))
    ours, theirs = planes[::2], planes[1::2]
    halves = f"prmt.b32 t, {x}, {y}, 0x5410; prmt.b32 u, {x}, {y}, 0x7632;"
    octets = f"prmt.b32 t, {x}, {y}, 0x5140; prmt.b32 u, {x}, {y}, 0x7362;"
    if width == 16:
        text = f"{halves} mov.b32 {pair(0)}, t; mov.b32 {pair(1)}, u;"
    elif FORMAT == INT4:
        text = halves + int4_levels("t", 0) + int4_levels("u", 4)
    elif FORMAT == INT8:
        text = octets + int8_levels("t", 0) + int8_levels("u", 2)
    elif FORMAT == FLOAT8:
        text = octets + float8_levels("t", 0) + float8_levels("u", 2)
    elif together == 1:
        text = looked_up(FORMAT, x, ours, table, lambda i: f"${2 * i}", later)
        text += looked_up(FORMAT, y, theirs, table, lambda i: f"${2 * i + 1}", later)
    else:
        text = ""
        for odd in (0, 1):
            text += alternating("t", x, y, width, odd)
            if planes_of(FORMAT):
                text += alternating("u", ours[0], theirs[0], FORMAT.behind, odd)
            out = (lambda i: f"${2 * i}") if odd == 0 else (lambda i: f"${2 * i + 1}")
            text += looked_up(FORMAT, "t", ("u",), table, out, later)
    return REGISTERS + text + " }"


@constexpr_function
def levels_operands(FORMAT, TOKENS):
    """Of the PTX above for a word of each of so many tokens."""
    inputs = TOKENS
    if FORMAT.together > 0:
        inputs += 1 + TOKENS * len(planes_of(FORMAT))
    if FORMAT.together == 2:
        return registers("r", 32 // FORMAT.width * TOKENS // 2, inputs)
    return registers("h", 32 // FORMAT.width * TOKENS, inputs)
