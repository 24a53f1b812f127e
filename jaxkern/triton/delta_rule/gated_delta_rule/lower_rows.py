"""How T and P T of a chunk lie in memory without the blocks above the diagonal.

Rows of blocks of 16 x 16 stand in whole lines of 64 numbers: of either matrix the last
row of blocks, and that of three with the first behind it; then the rows of two blocks
of both side by side. So 80 lines are written and read instead of 128, and from a row
of numbers to the next one it is always a line.
"""

from jaxkern.gpu.triton_call import constexpr_function

LINES = 80


@constexpr_function
def first_of(row, second):
    """Where a row of blocks begins, of T or of P T, the `second`."""
    if row == 1:
        return 64 * 64 + 32 * second
    return 32 * 64 * second + (16 * 64 + 48, None, 16 * 64, 0)[row]
