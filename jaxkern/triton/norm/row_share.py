"""What a program holds of a row: where it is, how it is read and written.

Where rows do not begin at multiples of 16 bytes a load of neighbours would be one of
single elements. So vectors are loaded that begin at such multiples: the first and the
last of a row are its neighbours' in part, and what is theirs counts as zero. Stores are
of whole vectors but for these two, which leave by elements.
"""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.norm.row_tiles import read, write
from jaxkern.triton.norm.split_rows import own_columns


@jit
def own_share(
    D: tl.constexpr, BLOCK: tl.constexpr, CLUSTER: tl.constexpr, VECTOR: tl.constexpr
):
    """A program's row, where that begins, its columns [BLOCK] and where they are.

    A row that does not begin at a multiple of VECTOR elements is held from the last one
    ahead of it: the first columns are negative, of the row before.
    """
    row = tl.program_id(0) // CLUSTER
    start = row.to(tl.int64) * D
    columns = own_columns(BLOCK, CLUSTER)
    at = start // VECTOR * VECTOR + columns
    if VECTOR > 1:
        columns -= (start % VECTOR).to(tl.int32)
    return row, start, columns, at


@jit
def read_share(
    ptr,
    start,
    columns,
    at,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """[BLOCK] in float32, zeros outside of the row; the last vector of a tensor, which
    may end behind it, by elements."""
    inside = (columns >= 0) & (columns < D)
    if VECTOR == 1:
        return read(ptr, at, inside)
    else:
        WHOLE: tl.constexpr = NUM_ROWS * D // VECTOR
        vector = at // VECTOR
        near = (vector >= start // VECTOR) & (vector <= (start + D - 1) // VECTOR)
        x = read(ptr, at, near & (vector < WHOLE))
        if NUM_ROWS * D % VECTOR != 0:
            x += read(ptr, at, inside & (vector >= WHOLE))
        return tl.where(inside, x, 0.0)


@jit
def write_share(ptr, start, columns, at, x, D: tl.constexpr, VECTOR: tl.constexpr):
    """The row's columns, whole vectors of it at once."""
    if ptr is not None:
        inside = (columns >= 0) & (columns < D)
        if VECTOR == 1:
            write(ptr, at, x, inside)
        else:
            vector = at // VECTOR
            first = (start + VECTOR - 1) // VECTOR
            whole = (vector >= first) & (vector < (start + D) // VECTOR)
            write(ptr, at, x, whole)
            write(ptr, at, x, inside & (whole == 0))
