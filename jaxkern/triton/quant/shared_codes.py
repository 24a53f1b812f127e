"""Words of a step of a tile in shared memory, as `block_codes.read_step` has them.

Of formats whose blocks of 256 columns and 16 rows lie one behind the other, 16 bytes
aligned. A step may be half of 256 columns where blocks are no longer than that.
"""

from jaxkern.gpu.bulk_ring import shared_half, shared_pair, shared_word
from jaxkern.gpu.triton_call import gl, gluon_jit
from jaxkern.triton.quant.four_bit_codes import (
    columns_of_group,
    is_grouped,
    is_nvfp4,
)


@gluon_jit
def read_shared(at, g, c, HALVES: gl.constexpr, FORMAT: gl.constexpr):
    """`at` is the address of the step, of a part of 256 / HALVES columns."""
    rows = at + 8 * g
    lane = rows + 64 * c
    if is_grouped(FORMAT):
        return read_grouped(rows, lane, HALVES, FORMAT)
    elif is_nvfp4(FORMAT):
        return read_words(rows, lane, 5, 40, 8)
    elif FORMAT == "Q8_0":
        return read_bytes(at + 4 * g, lane, HALVES)
    elif FORMAT == "MXFP4":
        return read_mxfp4(at + 2 * g, lane, HALVES)
    elif FORMAT == "Q6_K":
        return read_q6_k(at + 4 * g, rows, lane)
    elif FORMAT == "Q5_K":
        words = read_words(rows, lane, 4, 96, 8)
        return words + (shared_pair(lane, 256), shared_pair(lane, 512))
    else:
        return read_words(rows, lane, 4, 32, 8)


@gluon_jit
def read_words(
    rows, lane, HEAD: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr
):
    """HEAD words of 64 bits of a row, then COUNT of codes from word FIRST on."""
    words = ()
    for i in gl.static_range(HEAD):
        words += (shared_pair(rows, 64 * i),)
    for i in gl.static_range(COUNT):
        words += (shared_pair(lane, 8 * FIRST + 256 * i),)
    return words


@gluon_jit
def read_grouped(rows, lane, HALVES: gl.constexpr, FORMAT: gl.constexpr):
    GROUP: gl.constexpr = columns_of_group(FORMAT)
    words = ()
    for j in gl.static_range(256 // HALVES // GROUP):
        words += (shared_pair(rows, 8 * j * (8 + GROUP)),)
        for i in gl.static_range(GROUP // 32):
            words += (shared_pair(lane, 8 * (j * (8 + GROUP) + 8 + 32 * i)),)
    return words


@gluon_jit
def read_bytes(halves, lane, HALVES: gl.constexpr):
    words = ()
    for j in gl.static_range(8 // HALVES):
        words += (shared_word(halves, 544 * j),)
        words += (shared_pair(lane, 544 * j + 32), shared_pair(lane, 544 * j + 288))
    return words


@gluon_jit
def read_mxfp4(bytes_, lane, HALVES: gl.constexpr):
    words = ()
    for j in gl.static_range(8 // HALVES):
        words += (shared_half(bytes_, 272 * j), shared_pair(lane, 272 * j + 16))
    return words


@gluon_jit
def read_q6_k(halves, rows, lane):
    words = ()
    for i in gl.static_range(12):
        words += (shared_pair(lane, 256 * i),)
    for i in gl.static_range(4):
        words += (shared_pair(rows, 3072 + 64 * i),)
    words += (shared_word(halves, 3328),)
    return words
