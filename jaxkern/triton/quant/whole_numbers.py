"""Whole numbers in the registers of a lane: products, digits, words of the ring."""

from jaxkern.gpu.bulk_ring import shared_pair
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit


@constexpr_function
def product_text(SIGNED):
    kind = "s8" if SIGNED else "u8"
    return f"""mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32
        {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"""


@gluon_jit
def add_products(a, b0, b1, sums, SIGNED: gl.constexpr):
    """sums + a b of whole numbers: 16 rows, 8 columns, 32 terms."""
    return gl.inline_asm_elementwise(
        product_text(SIGNED),
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a[0], a[1], a[2], a[3], b0, b1, sums[0], sums[1], sums[2], sums[3]],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        True,
        1,
    )


@constexpr_function
def four_text(OFFSET):
    return f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{OFFSET}];"


@gluon_jit
def four_words(at, OFFSET: gl.constexpr):
    return gl.inline_asm_elementwise(
        four_text(OFFSET),
        "=r,=r,=r,=r,r",
        [at],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        False,
        1,
    )


@gluon_jit
def as_float(word):
    return word.to(gl.float32, bitcast=True)


@gluon_jit
def picked(word, selection):
    """2**23 + a byte of the word, which a number in a register says."""
    magic = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0x4b000000, $2;",
        "=r,r,r",
        [word, selection],
        gl.int32,
        True,
        1,
    )
    return as_float(magic)


@gluon_jit
def of_digits(sums):
    """256 times the sum of the first digit + that of the second, of either row."""
    return (
        (sums[0] * 256 + sums[1]).to(gl.float32),
        (sums[2] * 256 + sums[3]).to(gl.float32),
    )


@gluon_jit
def of_digits_from(sums, start):
    """The same, and a number that is added to both."""
    return (
        (sums[0] * 256 + start + sums[1]).to(gl.float32),
        (sums[2] * 256 + start + sums[3]).to(gl.float32),
    )


@gluon_jit
def word_of(at, c, W: gl.constexpr, OFFSET: gl.constexpr):
    """Word W of those 64 bytes apart; odd lanes have it where even ones have the next.

    So four lanes do not meet in the same banks.
    """
    if W % 2 == 0:
        return shared_pair(at + c % 2 * 64, OFFSET + 64 * W)
    else:
        return shared_pair(at + (1 - c % 2) * 64, OFFSET + 64 * (W - 1))
