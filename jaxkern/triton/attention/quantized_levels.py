"""PTX that decodes codes to float16 levels, as the registers of tensor cores want them.

A word has 32 bits of neighbouring codes. Of keys a register holds two dims of a token;
of values it holds two tokens for a dim, whose codes are brought together first.

A format is (bits of the main plane, of the second one, codes of one lookup), 0 or less
where levels are computed.
"""

from jaxkern.triton.triton_call import constexpr_function

# An entry has four bytes for each lane and leaves as many to another table, so that its
# address is a code as the second byte: one instruction.
ENTRY_BYTES = 256
INT8 = (8, 0, 0)  # code - 128
INT4 = (4, 0, 0)  # code - 8
FLOAT8 = (8, 0, -1)  # the bits of an e4m3fn float


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
def index_bytes(form, word, second, odd):
    """PTX of what four lookups of two codes of 2 or 3 bits are numbered by."""
    text = f"shr.u32 a, {word}, 4;" if odd else f"mov.b32 a, {word};"
    text += "and.b32 a, a, 0x0f0f0f0f;"
    if form[1]:
        # fields of 2 bits go to bits 4 and 5 of bytes
        text += f"prmt.b32 b, {second}, {second}, 0x1100;"
        text += f"shl.b32 s, b, {2 if odd else 4};"
        text += "shr.u32 b, b, 2;" if odd else ""
        text += "lop3.b32 s, s, b, 0x00ff00ff, 0xe4;"
        text += "lop3.b32 a, s, 0x30303030, a, 0xea;"
    return text


@constexpr_function
def looked_up(form, word, second, table, out):
    """PTX of lookups of all codes of a word; `out(i)` are the results of the i-th."""
    width, plane, together = form
    text = "mov.u32 c, %laneid; shl.b32 c, c, 2;"
    bytewise = width == 2
    for odd in (0, 1) if bytewise else (0,):
        if bytewise:
            text += index_bytes(form, word, second, odd)
        for i in range(4 if bytewise else 32 // (width * together)):
            if bytewise:
                text += f"prmt.b32 b, a, c, 0x55{i}4;"
                number = 2 * i + odd
            else:
                field = width * together
                if field == 8:
                    text += f"prmt.b32 b, {word}, c, 0x55{i}4;"
                else:
                    text += f"bfe.u32 b, {word}, {field * i}, {field};"
                    text += f"mad.lo.u32 b, b, {ENTRY_BYTES}, c;"
                if plane:
                    text += f"bfe.u32 s, {second}, {plane * i}, {plane};"
                    text += f"mad.lo.u32 b, s, {ENTRY_BYTES << field}, b;"
                number = i
            text += f"add.u32 b, b, {table};"
            if together == 2:
                text += f"ld.shared.b32 {out(number)}, [b];"
            else:
                text += f"ld.shared.b16 {out(number)}, [b];"
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
    """PTX of the levels of a word, given that of the second plane and the table."""
    count = 32 // FORMAT[0] // max(FORMAT[2], 1)
    word, second, table = (f"${count + i}" for i in range(3))
    if FORMAT[0] == 16:
        text = f"mov.b32 {pair(0)}, {word};"
    elif FORMAT == INT4:
        text = int4_levels(word, 0)
    elif FORMAT == INT8:
        text = int8_levels(word, 0)
    elif FORMAT == FLOAT8:
        text = float8_levels(word, 0)
    else:
        text = looked_up(FORMAT, word, second, table, lambda i: f"${i}")
    return REGISTERS + text + " }"


@constexpr_function
def value_levels(FORMAT):
    """PTX of the levels of the words of two tokens: of each dim both, together.

    What tokens have for a dim is brought together before it is decoded, not after.
    """
    width, plane, together = FORMAT
    count = 32 // width
    results = count if together == 2 else 2 * count
    x, y, p, q, table = (f"${results + i}" for i in range(5))
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
        text = looked_up(FORMAT, x, p, table, lambda i: f"${2 * i}")
        text += looked_up(FORMAT, y, q, table, lambda i: f"${2 * i + 1}")
    else:
        text = ""
        for odd in (0, 1):
            text += alternating("t", x, y, width, odd)
            text += alternating("u", p, q, plane, odd) if plane else ""
            out = (lambda i: f"${2 * i}") if odd == 0 else (lambda i: f"${2 * i + 1}")
            text += looked_up(FORMAT, "t", "u", table, out)
    return REGISTERS + text + " }"


@constexpr_function
def levels_operands(FORMAT, TOKENS):
    """Of the PTX above for a word of each of so many tokens."""
    inputs = 2 * TOKENS + 1 if FORMAT[2] > 0 else TOKENS
    if FORMAT[2] == 2:
        return registers("r", 32 // FORMAT[0] * TOKENS // 2, inputs)
    return registers("h", 32 // FORMAT[0] * TOKENS, inputs)
