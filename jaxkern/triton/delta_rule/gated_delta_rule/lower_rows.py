"""How matrices of `[64, 64]` lie in memory without the blocks above the diagonal.

Rows of blocks of 16 x 16 stand in whole lines of memory: the last row of blocks, that
of three with that of one behind it, and that of two. So 40 rows of 64 numbers are
written and read instead of 64.
"""

from jaxkern.gpu.triton_call import constexpr_function

LOWER_ROWS = 40  # of 64 numbers


@constexpr_function
def first_of(row):
    """Where a row of blocks begins."""
    return (16 * 64 + 48, 32 * 64, 16 * 64, 0)[row]


@constexpr_function
def stride_of(row):
    """From a row of numbers to the next one in a row of blocks."""
    return 32 if row == 1 else 64
