"""The words of a lane of one step of a tile, as `block_codes.read_step` has them, from
shared memory."""

from jaxkern.gpu.bulk_ring import shared_pair
from jaxkern.gpu.triton_call import gl, gluon_jit
from jaxkern.triton.quant.four_bit_codes import columns_of_group, is_grouped


@gluon_jit
def read_shared(at, g, c, HALVES: gl.constexpr, FORMAT: gl.constexpr):
    if is_grouped(FORMAT):
        return read_grouped(at, g, c, HALVES, FORMAT)
    else:
        return read_with_minima(at, g, c, FORMAT)


@gluon_jit
def read_grouped(at, g, c, HALVES: gl.constexpr, FORMAT: gl.constexpr):
    GROUP: gl.constexpr = columns_of_group(FORMAT)
    block = at + 8 * g
    lane = block + 64 * c
    words = ()
    for j in gl.static_range(256 // HALVES // GROUP):
        words += (shared_pair(block, 8 * j * (8 + GROUP)),)
        for i in gl.static_range(GROUP // 32):
            words += (shared_pair(lane, 8 * (j * (8 + GROUP) + 8 + 32 * i)),)
    return words


@gluon_jit
def read_with_minima(at, g, c, FORMAT: gl.constexpr):
    block = at + 8 * g
    lane = block + 64 * c
    words = ()
    for i in gl.static_range(4):
        words += (shared_pair(block, 64 * i),)
    first: gl.constexpr = 96 if FORMAT == "Q5_K" else 32
    for i in gl.static_range(8):
        words += (shared_pair(lane, 8 * first + 256 * i),)
    if FORMAT == "Q5_K":
        for i in gl.static_range(2):
            words += (shared_pair(lane, 256 + 256 * i),)
    return words
