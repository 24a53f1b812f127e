"""What warps load and store of chunks, each of a head of its own.

Rows of queries and keys are copied to shared memory all at once: a warp waits for
memory once. Warps of one key head have one copy.
"""

import dataclasses

from jaxkern.gpu.triton_call import (
    async_copy,
    async_load,
    constexpr_function,
    gl,
    gluon_jit,
    reinterpreted,
)
from jaxkern.triton.delta_rule.gated_delta_rule.block_inverse import (
    places,
    sums_layout,
    zero_block,
)
from jaxkern.triton.delta_rule.gated_delta_rule.lower_rows import LINES, first_of


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Shapes, and how many warps a program has, each with a head of its own."""

    tokens: int
    heads: int
    group: int
    h: int
    scale: float
    warps: int
    packed: bool = False  # matrices lie as in lower_rows.py

    @property
    def matrices(self) -> int:
        """Numbers that a chunk's two matrices take."""
        return 64 * (LINES if self.packed else 2 * 64)

    @property
    def chunks(self) -> int:
        return -(-self.tokens // 64)

    @property
    def steps(self) -> int:
        """Of 32 dims."""
        return -(-self.h // 32)

    @property
    def tall(self) -> int:
        """Blocks of 64 dims."""
        return -(-self.h // 64)

    @property
    def key_heads(self) -> int:
        """That a program copies; neighbouring warps share one, if they can."""
        if self.group % self.warps == 0:
            return 1
        return self.warps // (self.group if self.warps % self.group == 0 else 1)

    @property
    def bytes_of_rows(self) -> int:
        """Shared memory for the keys, or queries, of a program."""
        return self.key_heads * self.tall * 64 * 64 * 2

    @property
    def row(self) -> int:
        """From a token's row of keys to the next token's."""
        return self.heads // self.group * self.h


@constexpr_function
def words_layout(heads, warps):
    """Key head, its warp, 16 rows of 16 words: 16 bytes a lane."""
    apart = [heads, warps // heads, 1, 1]
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], apart, [3, 2, 1, 0])


@constexpr_function
def rows_layout(warps, heads=None):
    """Of rows of 64 numbers of 16 bits, 16 bytes a lane."""
    heads = warps if heads is None else heads
    apart = [heads, warps // heads, 1]
    return gl.BlockedLayout([1, 1, 8], [1, 4, 8], apart, [2, 1, 0])


@constexpr_function
def line_layout(warps):
    """Of a number for each token of a chunk."""
    return gl.BlockedLayout([1, 2], [1, 32], [warps, 1], [1, 0])


@gluon_jit
def copy_heads(ptr, first_head, left, P: gl.constexpr):
    """Starts copies of a chunk's rows, zeros beyond the last row or dim."""
    HEADS: gl.constexpr = P.key_heads
    L: gl.constexpr = rows_layout(P.warps, HEADS)
    TALL: gl.constexpr = P.tall
    ROOM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    SHAPE: gl.constexpr = [TALL, HEADS, 64, 64]
    room = gl.allocate_shared_memory(ptr.dtype.element_ty, SHAPE, ROOM)
    number, row, column = places(HEADS, 64, 64, L)
    head = (first_head + number * (P.warps // HEADS)) // P.group
    at = row.to(gl.int64) * P.row + (head * P.h + column)
    for part in gl.static_range(TALL):
        inside = (row < left) & (part * 64 + column < P.h)
        async_load(room.index(part), ptr + (at + part * 64), inside)
    async_copy.commit_group()
    return room


@gluon_jit
def in_words(room):
    """The same memory, two numbers a word."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    TALL: gl.constexpr = room.shape[0]
    HEADS: gl.constexpr = room.shape[1]
    return reinterpreted(room, gl.int32, [TALL, HEADS, 64, 32], WORDS)


@gluon_jit
def load_words(room, ROW: gl.constexpr, STEP: gl.constexpr, P: gl.constexpr):
    """32 dims of 16 tokens as a block of words.

    Four words that lie side by side come to one lane, which has them as columns 2 t,
    2 t + 1, 2 t + 8 and 2 t + 9: any order of dims will do.
    """
    W: gl.constexpr = P.warps
    HEADS: gl.constexpr = P.key_heads
    L: gl.constexpr = words_layout(HEADS, W)
    rows = room.index(STEP // 2).slice(16 * ROW, 16, 1)
    words = rows.slice(STEP % 2 * 16, 16, 2).load(gl.SliceLayout(1, L))
    each = gl.zeros([HEADS, W // HEADS, 16, 16], gl.int32, L)
    words, _ = gl.broadcast(gl.expand_dims(words, 1), each)
    words = gl.permute(gl.reshape(words, [W, 16, 4, 2, 2]), [0, 1, 3, 2, 4])
    words = gl.reshape(words, [W, 16, 16])
    return gl.convert_layout(words, sums_layout(W), assert_trivial=True)


@gluon_jit
def one_sum(x, y):
    return x + y


@gluon_jit
def line_places(W: gl.constexpr):
    """Warp and token."""
    L: gl.constexpr = line_layout(W)
    warp = gl.arange(0, W, gl.SliceLayout(1, L))
    return warp[:, None], gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]


@gluon_jit
def load_gates(ptr, left, P: gl.constexpr):
    warp, token = line_places(P.warps)
    return gl.load(ptr + (token * P.heads + warp), token < left, 0.0).to(gl.float32)


@gluon_jit
def chunk_vectors(g, beta, vectors_ptr, P: gl.constexpr):
    """Stores the vectors. Sums of g for powers of 2, beta, to_end in shared memory."""
    W: gl.constexpr = P.warps
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kept = gl.allocate_shared_memory(gl.float32, [4, W, 64], PLAIN)
    total = gl.associative_scan(gl.where(g < -120.0, -120.0, g), 1, one_sum)
    kept.index(3).store(total)
    end = kept.index(3).slice(63, 1, 1).load(line_layout(W))
    to_end = gl.exp(end - total)
    warp, token = line_places(W)
    to = vectors_ptr + (warp.to(gl.int64) * (P.chunks * 4 * 64) + token)
    gl.store(to, gl.exp(total))
    gl.store(to + 64, to_end)
    gl.store(to + 2 * 64, beta)
    gl.store(to + 3 * 64, total)
    kept.index(0).store(1.4426950408889634 * total)
    kept.index(1).store(beta)
    kept.index(2).store(to_end)
    return kept


@gluon_jit
def of_rows(vectors, WHICH: gl.constexpr, ROW: gl.constexpr):
    """What a vector has for the 16 rows of a block."""
    L: gl.constexpr = gl.SliceLayout(2, sums_layout(vectors.shape[1]))
    return vectors.index(WHICH).slice(16 * ROW, 16, 1).load(L)[:, :, None]


@gluon_jit
def of_columns(vectors, WHICH: gl.constexpr, COLUMN: gl.constexpr):
    L: gl.constexpr = gl.SliceLayout(1, sums_layout(vectors.shape[1]))
    return vectors.index(WHICH).slice(16 * COLUMN, 16, 1).load(L)[:, None, :]


@gluon_jit
def of_row(vectors, WHICH: gl.constexpr, TOKEN: gl.constexpr):
    L: gl.constexpr = gl.SliceLayout(2, sums_layout(vectors.shape[1]))
    return vectors.index(WHICH).slice(TOKEN, 1, 1).load(L)[:, :, None]


@gluon_jit
def block_at(blocks, COLUMN: gl.constexpr, DTYPE: gl.constexpr):
    block = zero_block(blocks[0].shape[0])
    if COLUMN < len(blocks):
        block = blocks[COLUMN]
    return block.to(DTYPE)


@gluon_jit
def beside(blocks, DTYPE: gl.constexpr):
    """Up to four blocks in a row `[16, 64]`, zeros behind the last."""
    W: gl.constexpr = blocks[0].shape[0]
    first = gl.join(block_at(blocks, 0, DTYPE), block_at(blocks, 1, DTYPE))
    last = gl.join(block_at(blocks, 2, DTYPE), block_at(blocks, 3, DTYPE))
    row = gl.permute(gl.join(first, last), [0, 1, 4, 3, 2])
    return gl.reshape(row, [W, 16, 64])


@gluon_jit
def store_row(ptr, blocks, rows, STRIDE: gl.constexpr):
    """`[16, 64]` of each warp; STRIDE from one warp's to the next."""
    x = beside(blocks, ptr.dtype.element_ty)
    W: gl.constexpr = x.shape[0]
    L: gl.constexpr = rows_layout(W)
    warp, row, column = places(W, 16, 64, L)
    at = warp.to(gl.int64) * STRIDE + (row * 64 + column)
    gl.store(ptr + at, gl.convert_layout(x, L), row < rows)


@gluon_jit
def store_lower_row(
    ptr, blocks, ROW: gl.constexpr, SECOND: gl.constexpr, P: gl.constexpr
):
    """A row of blocks of T, or of P T, the SECOND; of each warp, from its chunk on."""
    STRIDE: gl.constexpr = P.chunks * P.matrices
    if P.packed:
        x = beside(blocks, ptr.dtype.element_ty)
        W: gl.constexpr = x.shape[0]
        L: gl.constexpr = rows_layout(W)
        warp, row, column = places(W, 16, 64, L)
        at = warp.to(gl.int64) * STRIDE + (row * 64 + column)
        at += first_of(ROW, SECOND)
        gl.store(ptr + at, gl.convert_layout(x, L), column < 16 * (ROW + 1))
    else:
        store_row(ptr + (64 * SECOND + 16 * ROW) * 64, blocks, 16, STRIDE)
