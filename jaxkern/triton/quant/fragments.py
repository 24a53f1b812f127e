"""Single instructions on the registers of a lane, for products with packed weights.

A tensor `[warps, 8, 4]` has one number in every lane: lane 4 g + c of warp w holds
element (w, g, c). In a matrix instruction m16n8k16 that lane holds rows g and g + 8 of
the weights, columns 2 c and 2 c + 1 of the sums, column g of the activations.
"""

from typing import Any

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit

# one function, whose name changed between the versions that are supported
barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)

MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"""


# bits of the constants that are multiplied
BFLOAT16 = {0: 0, 1: 0x3F80, -128: 0xC300, -132: 0xC304, -136: 0xC308, -140: 0xC30C}
BFLOAT16 |= {-130: 0xC302, -144: 0xC310, -160: 0xC320, -70: 0xC28C}


@constexpr_function
def mma_text():
    return MMA


@constexpr_function
def prmt_text(OTHER, SELECTION):
    return f"prmt.b32 $0, $1, {OTHER:#x}, {SELECTION:#x};"


@gluon_jit
def bytes_of(word, OTHER: gl.constexpr, SELECTION: gl.constexpr):
    """Byte i is the one of OTHER : word that digit i of SELECTION says."""
    return gl.inline_asm_elementwise(
        prmt_text(OTHER, SELECTION), "=r,r", [word], gl.int32, True, 1
    )


@gluon_jit
def mma(a, b, sums):
    """sums + a b: 16 rows of weights, 8 columns of activations, 16 terms."""
    return gl.inline_asm_elementwise(
        mma_text(),
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a[0], a[1], a[2], a[3], b[0], b[1], sums[0], sums[1], sums[2], sums[3]],
        (gl.float32, gl.float32, gl.float32, gl.float32),
        True,
        1,
    )


@gluon_jit
def rows_of(pair):
    """The two words of 64 bits: those of rows 2 g and 2 g + 1 of a tile."""
    return pair.to(gl.int32), (pair >> 32).to(gl.int32)


@constexpr_function
def pick_text(SELECTION):
    return f"prmt.b32 $0, $1, $2, {SELECTION:#x};"


@gluon_jit
def pick(word, other, SELECTION: gl.constexpr):
    """`bytes_of` with the other in a register: there is room for one number alone."""
    return gl.inline_asm_elementwise(
        pick_text(SELECTION), "=r,r,r", [word, other], gl.int32, True, 1
    )


@gluon_jit
def unsigned_codes(first, second, magic):
    """128 + code as bfloat16, of four codes below 128 in the bytes of either row.

    `magic` is 0x43434343 in a register.
    """
    return (
        pick(first, magic, 0x4140),
        pick(second, magic, 0x4140),
        pick(first, magic, 0x4342),
        pick(second, magic, 0x4342),
    )


@gluon_jit
def fma_of_pairs(a, b, c):
    """a b + c of two bfloat16 in a word each, rounded once."""
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $2, $3, $1;", "=r,r,r,r", [c, a, b], gl.int32, True, 1
    )


@gluon_jit
def signed_pair(low, high, magic, minus, SELECTION: gl.constexpr):
    """Two bytes from -128 to 127 as bfloat16: (128 + low bits) - (128 or 256)."""
    low, high = pick(low, magic, SELECTION), pick(high, magic, SELECTION)
    return fma_of_pairs(high, minus, low)


@gluon_jit
def signed_codes(first, second, magic, minus):
    """Four bytes from -128 to 127 of either row as bfloat16.

    `minus` is -1 in bfloat16, twice, in a register.
    """
    low0, high0 = first & 0x7F7F7F7F, first & -0x7F7F7F80
    low1, high1 = second & 0x7F7F7F7F, second & -0x7F7F7F80
    return (
        signed_pair(low0, high0, magic, minus, 0x4140),
        signed_pair(low1, high1, magic, minus, 0x4140),
        signed_pair(low0, high0, magic, minus, 0x4342),
        signed_pair(low1, high1, magic, minus, 0x4342),
    )


@constexpr_function
def twice(VALUE):
    """A number that bfloat16 has, twice in a word, as int32."""
    word = BFLOAT16[VALUE] << 16 | BFLOAT16[VALUE]
    return word - (1 << 32) if word >> 31 else word


@gluon_jit
def constant_rows(nothing, VALUE: gl.constexpr):
    """All rows the same number: a product with them is a sum over the terms."""
    word = nothing + twice(VALUE)
    return word, word, word, word


@gluon_jit
def byte_as_float(word, AT: gl.constexpr):
    """2**23 + byte AT of the word, unsigned."""
    magic = bytes_of(word, 0x4B000000, 0x7540 + AT)
    return magic.to(gl.float32, bitcast=True)


@gluon_jit
def times_byte(d, word, AT: gl.constexpr):
    """d times byte AT of the word, unsigned: exact, d having 11 bits."""
    return gl.fma(d, byte_as_float(word, AT), d * -8388608.0)


@gluon_jit
def as_pair(low, high):
    """Two float32 as bfloat16 in a word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
    )


@gluon_jit
def float_of_half(word):
    """The float16 in the low half of a word."""
    return word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon_jit
def in_lanes(a):
    """[warps, 8, 4] beside sums of several columns."""
    return gl.expand_dims(a, 3)


@gluon_jit
def in_lanes4(a):
    return in_lanes(a[0]), in_lanes(a[1]), in_lanes(a[2]), in_lanes(a[3])


@gluon_jit
def scaled(totals, sums, first, second, SINGLE: gl.constexpr):
    """totals + scale * sums, a scale for each of the two rows of a lane.

    A SINGLE activation is column 0: what stands in odd columns means nothing.
    """
    first = in_lanes(first)
    second = in_lanes(second)
    t0 = gl.fma(first, sums[0], totals[0])
    t2 = gl.fma(second, sums[2], totals[2])
    if SINGLE:
        return t0, totals[1], t2, totals[3]
    else:
        t1 = gl.fma(first, sums[1], totals[1])
        return t0, t1, t2, gl.fma(second, sums[3], totals[3])


@constexpr_function
def shared_text(OFFSET):
    return f"ld.shared.v2.b32 {{$0, $1}}, [$2+{OFFSET}];"


DIRECT, RAGGED = 0, -1  # where activations come from; else from shared memory


@gluon_jit
def fragment(x, F: gl.constexpr, FROM: gl.constexpr):
    """Columns 16 F to 16 F + 15 of a step of the activations, eight rows of them.

    x is, where the program has put them into shared memory, addresses, and FROM the
    bytes of 16 columns; else pointers to the lane's four columns, which rows there are,
    and, if they are RAGGED, how many of its words of four columns are left.
    """
    if FROM > 0:
        return gl.inline_asm_elementwise(
            shared_text(F * FROM),
            "=r,=r,r",
            [x[0]],
            (gl.int32, gl.int32),
            False,
            1,
        )
    else:
        mask = x[1]
        if FROM == -1:
            mask = mask & (x[2] > 4 * F)
        return rows_of(gl.load(x[0] + 4 * F, mask, 0))
