"""What warps load and store of chunks, each of a head of its own."""

import dataclasses

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.delta_rule.gated_delta_rule.block_inverse import (
    places,
    sums_layout,
    zero_block,
)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Shapes, and how many warps a program has, each with a head of its own."""

    tokens: int
    heads: int
    group: int
    h: int
    scale: float
    warps: int

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
    def row(self) -> int:
        """From a token's row of keys to the next token's."""
        return self.heads // self.group * self.h


@constexpr_function
def words_layout(warps):
    """Of 16 words of each of 16 rows, 16 bytes a lane."""
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def rows_layout(warps):
    """Of rows of 64 numbers of 16 bits, 16 bytes a lane."""
    return gl.BlockedLayout([1, 1, 8], [1, 4, 8], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def line_layout(warps):
    """Of a number for each token of a chunk."""
    return gl.BlockedLayout([1, 2], [1, 32], [warps, 1], [1, 0])


@gluon_jit
def first_words(ptr, first_head, P: gl.constexpr):
    """Where the first 32 dims of 16 tokens lie: others are constants away."""
    warp, row, word = places(P.warps, 16, 16, words_layout(P.warps))
    head = (first_head + warp) // P.group
    at = row.to(gl.int64) * (P.row // 2) + (head * (P.h // 2) + word)
    return ptr.to(gl.pointer_type(gl.int32)) + at


@gluon_jit
def load_words(start, ROW: gl.constexpr, STEP: gl.constexpr, left, P: gl.constexpr):
    """32 dims of 16 tokens as a block of words, zeros beyond the last.

    Four words that lie side by side come to one lane, which has them as columns 2 t,
    2 t + 1, 2 t + 8 and 2 t + 9: any order of dims will do.
    """
    W: gl.constexpr = P.warps
    start += 8 * ROW * P.row + 16 * STEP
    if P.tokens % 64 == 0 and P.h % 32 == 0:
        words = gl.load(start)
    else:
        _, row, word = places(W, 16, 16, words_layout(W))
        inside = (row < left - 16 * ROW) & (STEP * 16 + word < P.h // 2)
        words = gl.load(start, inside, 0)
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
