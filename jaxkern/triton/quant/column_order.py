"""Code words of a step in the order of columns, so that activations need no other.

A lane reads four neighbouring columns of every 16, and wgmma expects of it columns 2 c,
2 c + 1, 2 c + 8 and 2 c + 9. So the four lanes of a row exchange halves of their words
while they are packed: two bytes from one lane, two from another.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.block_codes import (
    has_fifth_bits,
    is_few_bits,
    is_small,
    words_of_block,
)
from jaxkern.triton.quant.fixed_point_experts import of_lane
from jaxkern.triton.quant.four_bit_codes import columns_of_group, is_grouped
from jaxkern.triton.quant.fragments import rows_of


@constexpr_function
def is_exchanged(FORMAT):
    """Whether the packed words of a format can be: bytes of four columns each.

    Fifth bits of 32 columns stand in one word, which every lane has.
    """
    return not (is_small(FORMAT) and has_fifth_bits(FORMAT))


@constexpr_function
def has_codes(FORMAT, WORD):
    """Whether a word of `read_step`, by its number, has codes of the lane's columns."""
    if is_grouped(FORMAT):
        return WORD % (1 + columns_of_group(FORMAT) // 32) != 0
    if is_small(FORMAT):
        each, _, codes = words_of_block(FORMAT)
        return WORD % each >= codes
    if FORMAT == "Q6_K":
        return WORD < 12
    first = {"Q4_K": 4, "Q5_K": 4, "IQ4_XS": 3, "NVFP4_256": 5}
    return WORD >= (5 if is_few_bits(FORMAT) else first[FORMAT])


@gluon_jit
def halves_of(low, high, selection):
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [low, high, selection],
        gl.int32,
        True,
        1,
    )


@gluon_jit
def in_order_of_columns(words, g, c, FORMAT: gl.constexpr):
    """The words of a step, those with codes exchanged between the lanes of a row."""
    if not is_exchanged(FORMAT):
        return words
    lane = 4 * g + c // 2
    selection = gl.where(c % 2 == 0, 0x5410, 0x7632)
    ordered = ()
    for i in gl.static_range(len(words)):
        if has_codes(FORMAT, i):
            first, second = rows_of(words[i])
            first = halves_of(of_lane(first, lane), of_lane(first, lane + 2), selection)
            second = halves_of(
                of_lane(second, lane), of_lane(second, lane + 2), selection
            )
            both = (first.to(gl.int64) & 0xFFFFFFFF) | (second.to(gl.int64) << 32)
            ordered += (both,)
        else:
            ordered += (words[i],)
    return ordered
