"""Which rows of a cache new tokens take, and what becomes of the rows that none takes.

A token's row follows from the position of its sequence, or from its slot among all
pages. The caches are operands and results in one buffer, so that the other rows stay
without being touched.

XLA need not keep to that. Where a cache is a slice of a larger array, as in a scan over
layers or under vmap, it may hand over the slice of the old array and the slice of the
new one. `carry_over` compares the two addresses: it ends at once where those are the
same, and else reads and writes the rows that are not written.

CALL is (tokens, those of a sequence, slots of a sequence or of all pages, ring, rows of
the cache), `places` the pointers (positions, lengths, slots), of which some are None.
"""

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, tl

COPIED = 1024  # elements at once


def copy_tile(length: int) -> tuple[int, int, int]:
    """Length of a row of a cache, and columns and rows that are copied at once."""
    width = min(next_power_of_2(length), COPIED)
    return length, width, COPIED // width


@jit
def new_tokens(lengths_ptr, b, present, T: tl.constexpr):
    """How many of its T tokens a sequence writes."""
    count = b * 0 + T
    if lengths_ptr is not None:
        lengths = tl.load(lengths_ptr + b, present, 0).to(tl.int64)
        count = tl.minimum(lengths, T)
    return count


@jit
def rows_of(token, present, places, CALL: tl.constexpr):
    """The row of each token in the cache, as [b s] or [pages], and if it is written."""
    T: tl.constexpr = CALL[1]
    S: tl.constexpr = CALL[2]
    RING: tl.constexpr = CALL[3]
    positions_ptr, lengths_ptr, slots_ptr = places
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token, present, -1).to(tl.int64)
        return slot, present & (slot >= 0) & (slot < S)
    else:
        b = token // T
        i = token % T
        slot = tl.load(positions_ptr + b, present, 0).to(tl.int64) + i
        count = new_tokens(lengths_ptr, b, present, T)
        counts = present & (i < count)
        if RING:
            counts &= i >= count - S  # of more than s new tokens the last s
            slot = (slot % S + S) % S
        return b * S + slot, counts & (slot >= 0) & (slot < S)


@jit
def is_written(row, places, CALL: tl.constexpr):
    """For rows [rows, 1] of the cache: the inverse of rows_of."""
    TOKENS: tl.constexpr = CALL[0]
    T: tl.constexpr = CALL[1]
    S: tl.constexpr = CALL[2]
    RING: tl.constexpr = CALL[3]
    NUM_ROWS: tl.constexpr = CALL[4]
    positions_ptr, lengths_ptr, slots_ptr = places
    if slots_ptr is not None:
        count = tl.zeros(row.shape, tl.int32)
        for first in range(0, TOKENS, 64):
            token = first + tl.arange(0, 64)[None, :]
            slot = tl.load(slots_ptr + token, token < TOKENS, -1).to(tl.int64)
            count += tl.sum((slot == row).to(tl.int32), 1, keep_dims=True)
        return count > 0
    else:
        b = row // S
        i = row % S - tl.load(positions_ptr + b, row < NUM_ROWS, 0).to(tl.int64)
        if RING:
            i = (i % S + S) % S
        count = new_tokens(lengths_ptr, b, row < NUM_ROWS, T)
        return (i >= 0) & (i < count)


@jit
def carry_over(
    program,
    old_ptr,
    new_ptr,
    places,
    CALL: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Every PROGRAMS-th block of the rows that this call does not write."""
    NUM_ROWS: tl.constexpr = CALL[4]
    LENGTH: tl.constexpr = TILE[0]
    WIDTH: tl.constexpr = TILE[1]
    HEIGHT: tl.constexpr = TILE[2]
    if old_ptr.to(tl.int64) != new_ptr.to(tl.int64):
        blocks: tl.constexpr = (NUM_ROWS + HEIGHT - 1) // HEIGHT
        for k in range(0, (blocks + PROGRAMS - 1) // PROGRAMS):
            first = (program + k * PROGRAMS).to(tl.int64) * HEIGHT
            row = first + tl.arange(0, HEIGHT)[:, None]
            stays = (row < NUM_ROWS) & (is_written(row, places, CALL) == 0)
            for start in range(0, LENGTH, WIDTH):
                column = start + tl.arange(0, WIDTH)[None, :]
                at = row * LENGTH + column
                mask = stays & (column < LENGTH)
                tl.store(new_ptr + at, tl.load(old_ptr + at, mask), mask)
