"""Codes that name an entry of a table of 16: IQ4_NL, IQ4_XS and MXFP4, see block_codes.

Four neighbouring fields of 4 bits choose four bytes of a table of 8 in one instruction;
two tables and the highest bits of the fields, spread over bytes, make 16. Where the
highest bit of a field is set the instruction gives the sign of the byte instead, which
is zero for a byte below 128. So of a table of such bytes both halves are looked up, the
upper one by fields whose highest bits are turned over, and one of the two is zero.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.fragments import float_of_half, pick, rows_of

# numbers of a code, as signed bytes or, of doubled e2m1, 12 more than they are
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)


@constexpr_function
def choose_text(UPPER):
    """The lower or upper eight bytes of IQ4, chosen by four fields of a word."""
    table = IQ4[8:] if UPPER else IQ4[:8]
    low, high = (
        sum((v & 255) << 8 * i for i, v in enumerate(table[at : at + 4]))
        for at in (0, 4)
    )
    return (
        f"{{ .reg .b32 l, h; mov.b32 l, {low:#x}; mov.b32 h, {high:#x}; "
        "prmt.b32 $0, l, h, $1; }"
    )


@gluon_jit
def chosen(fields, UPPER: gl.constexpr):
    return gl.inline_asm_elementwise(
        choose_text(UPPER), "=r,r", [fields], gl.int32, True, 1
    )


@constexpr_function
def four_entries(AT):
    """Entries AT to AT + 3 of the table of MXFP4 in a word."""
    return sum(v << 8 * i for i, v in enumerate(E2M1[AT : AT + 4]))


@gluon_jit
def starts_of_tables(nothing):
    """The first words of both halves in registers; `nothing` is a zero there."""
    return nothing + four_entries(0), nothing + four_entries(8)


@constexpr_function
def eight_text(AT):
    return f"prmt.b32 $0, $1, {four_entries(AT):#x}, $2;"


@gluon_jit
def of_eight(start, fields, REST: gl.constexpr):
    """Bytes of eight, `start` and the four entries from REST on."""
    return gl.inline_asm_elementwise(
        eight_text(REST), "=r,r,r", [start, fields], gl.int32, True, 1
    )


@gluon_jit
def doubled_e2m1(word, turned, starts):
    """12 more than twice the numbers of the four lowest fields of a word.

    `turned` is the word with the highest bits of its fields turned over.
    """
    # one of the two is zero: a sum may run where products do
    return of_eight(starts[0], word, 4) + of_eight(starts[1], turned, 12)


@gluon_jit
def turned_over(word):
    """The highest bit of each field of 4 bits turned over."""
    return word ^ -0x77777778


@gluon_jit
def entries(word):
    """The numbers of IQ4 of the four lowest fields of a word."""
    low = word & 0x77777777
    # bytes 0xFF where a field's highest bit is set, else 0x80
    upper = gl.inline_asm_elementwise(
        "{ .reg .b32 s; mov.b32 s, 0x80808080; prmt.b32 $0, s, s, $1; }",
        "=r,r",
        [word],
        gl.int32,
        True,
        1,
    )
    # where it is not, bit 7 would be that of the upper half
    upper = (upper & 0x01010101) * 255
    return (chosen(low, False) & (upper ^ -1)) | (chosen(low, True) & upper)


@gluon_jit
def every_other(first, second, HIGH: gl.constexpr):
    """Of eight bytes in two words the first, third and so on, or the others."""
    if HIGH:
        return pick(first, second, 0x7531)
    else:
        return pick(first, second, 0x6420)


@gluon_jit
def look_up(word, HIGH: gl.constexpr):
    """Of four bytes with two fields each: IQ4 of the low ones, or of the high ones."""
    return every_other(entries(word), entries(word >> 16), HIGH)


@gluon_jit
def look_up_e2m1(word, starts, HIGH: gl.constexpr):
    """`look_up` of 12 more than twice the numbers."""
    turned = turned_over(word)
    first = doubled_e2m1(word, turned, starts)
    second = doubled_e2m1(word >> 16, turned >> 16, starts)
    return every_other(first, second, HIGH)


@gluon_jit
def scale_of_power(byte):
    """2**(byte - 128): the numbers are doubled."""
    # the exponent of a normal number; the two least bytes give powers below those
    word = gl.maximum(byte * (1 << 23) - (1 << 23), byte * (1 << 21) + (1 << 21))
    return word.to(gl.float32, bitcast=True)


@gluon_jit
def read_iq4_xs(block, g, c):
    """d and high bits of scales; low bits of scales; codes."""
    halves = block.to(gl.pointer_type(gl.int32), bitcast=True) + g
    words = (gl.load(halves), gl.load(halves + 8), gl.load(block + g + 8))
    for i in gl.static_range(8):
        at = block + g + 8 * c + (16 + 32 * i)
        words += (gl.load(at, eviction_policy="evict_first"),)
    return words


@gluon_jit
def codes_iq4_xs(words, F: gl.constexpr):
    first, second = rows_of(words[3 + F // 2])
    return look_up(first, F % 2), look_up(second, F % 2)


@gluon_jit
def scales_iq4_xs(words, J: gl.constexpr):
    low = rows_of(words[2])
    high = (words[1], words[1] >> 16)
    d = (words[0], words[0] >> 16)
    scales = ()
    for r in gl.static_range(2):
        s = ((low[r] >> (4 * J)) & 15) | (((high[r] >> (2 * J)) & 3) << 4)
        scales += (float_of_half(d[r]) * (s - 32).to(gl.float32),)
    return scales
