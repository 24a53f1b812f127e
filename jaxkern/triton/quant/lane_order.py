"""Activations in the order in which the lanes of a warp decode weights.

A word is a pair of columns. Of a part the words lie lane by lane, to come word by word:

    a0 a1 b0 b1 c0 c1 d0 d1   ->   a0 b0 c0 d0 a1 b1 c1 d1      of lanes a to d
"""

import jax

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.triton_call import jit, tl

BLOCK = 512  # of four words, of a program


@jit
def lane_order_kernel(
    x_ptr,
    y_ptr,
    FOURS: tl.constexpr,
    OF_ROW: tl.constexpr,
    WORDS: tl.constexpr,
    LANE_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x of rows of WORDS; y `[FOURS, 4]` words, OF_ROW fours of each row.

    Zeros behind the last word of a row.
    """
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    y_ptr = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    four = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, 4)[None, :]
    row, place = four // OF_ROW, four % OF_ROW
    part, word = place // LANE_WORDS, place % LANE_WORDS
    column = (part * 4 + lane) * LANE_WORDS + word
    at = row.to(tl.int64) * WORDS + column
    y = tl.load(x_ptr + at, (four < FOURS) & (column < WORDS), 0)
    tl.store(y_ptr + four.to(tl.int64) * 4 + lane, y, four < FOURS)


def in_lane_order(x: jax.Array, lane_words: int) -> jax.Array:
    """bfloat16 x `[rows, columns]`, an even number; zeros fill the last part."""
    rows, columns = x.shape
    parts = -(-columns // (8 * lane_words))
    fours = rows * parts * lane_words
    [y] = bridge.triton_call(
        lane_order_kernel,
        x,
        out=[jax.ShapeDtypeStruct((rows, parts * 8 * lane_words), x.dtype)],
        grid=(-(-fours // BLOCK),),
        FOURS=fours,
        OF_ROW=parts * lane_words,
        WORDS=columns // 2,
        LANE_WORDS=lane_words,
        BLOCK=BLOCK,
    )
    return y
