"""Words of a step of a tile in shared memory, as `block_codes.read_step` has them.

Of formats whose blocks of 256 columns and 16 rows lie one behind the other.
"""

from jaxkern.gpu.bulk_ring import shared_pair
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.four_bit_codes import columns_of_group, is_grouped


@constexpr_function
def has_shared_words(FORMAT):
    return is_grouped(FORMAT) or FORMAT == "Q4_K"


@gluon_jit
def read_shared(at, g, c, FORMAT: gl.constexpr):
    """Of a lane, all words of the step at the address `at`."""
    row = at + 8 * g
    codes = row + 64 * c
    words = ()
    if is_grouped(FORMAT):
        GROUP: gl.constexpr = columns_of_group(FORMAT)
        for j in gl.static_range(256 // GROUP):
            words += (shared_pair(row, 8 * j * (8 + GROUP)),)
            for i in gl.static_range(GROUP // 32):
                words += (shared_pair(codes, 8 * (j * (8 + GROUP) + 8 + 32 * i)),)
    else:
        for i in gl.static_range(4):
            words += (shared_pair(row, 64 * i),)
        for i in gl.static_range(8):
            words += (shared_pair(codes, 256 + 256 * i),)
    return words
