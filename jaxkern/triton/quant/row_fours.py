"""MXFP4 as folders keep it, row by row, as the lanes of a warp take it to products.

A warp reads 16 rows by 256 columns in two parts of 128: of each, lane 4 g + c has the
32 columns from 32 c on of rows g and g + 8, which are 16 bytes and one scale. Fragment
F of a part has four of them, so the activations follow in this order.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.row_codes import read_unit
from jaxkern.triton.quant.table_codes import (
    doubled_e2m1,
    scale_of_power,
    starts_of_tables,
    turned_over,
)

BY_ROWS = "MXFP4_ROWS"  # the name of the format
PART = 128  # columns, of which a lane has one group


@constexpr_function
def is_by_rows(FORMAT):
    return FORMAT == "MXFP4_ROWS"


@gluon_jit
def read_by_rows(codes, scales, g, c, step, GROUPS: gl.constexpr):
    """All words of a lane of one step: of each part two rows, four words and a scale.

    `codes` `[16, GROUPS]` of 16 bytes and `scales` `[16, GROUPS]`, of a tile. In place
    of what lies behind the last group that one is read; x is zero there.
    """
    words = ()
    for part in gl.static_range(2):
        group = gl.minimum(step * 8 + part * 4 + c, GROUPS - 1)
        for i in gl.static_range(2):
            at = (g + 8 * i) * GROUPS + group
            words += read_unit(codes + 2 * at, 0, "e2m1")
            words += (gl.load(scales + at).to(gl.int32),)
    return words


@gluon_jit
def codes_by_rows(words, nothing, F: gl.constexpr):
    """12 more than twice the numbers of fragment F of rows g and g + 8."""
    AT: gl.constexpr = F // 8 * 10 + F % 8 // 2
    starts = starts_of_tables(nothing)
    rows = ()
    for i in gl.static_range(2):
        word = words[AT + 5 * i] >> (16 * (F % 2))
        rows += (doubled_e2m1(word, turned_over(word), starts),)
    return rows


@gluon_jit
def scales_by_rows(words, J: gl.constexpr):
    """Half of the scales of part J of rows g and g + 8; 255 is NaN."""
    rows = ()
    for i in gl.static_range(2):
        byte = words[10 * J + 4 + 5 * i]
        scale = scale_of_power(byte)
        rows += (gl.where(byte == 255, float("nan"), scale),)
    return rows
