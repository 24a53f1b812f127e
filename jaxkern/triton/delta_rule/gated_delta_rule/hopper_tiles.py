"""What the kernels for compute capability 9.0 share: shapes, tiles of shared memory,
and the bars between the warps that copy and those that multiply.

Four warps beside those of a kernel copy to places of shared memory in turn. A place
has two bars: at one the products wait until its copies have come, at the other the
copies until it has been read. No fence of proxies stands between copies and products,
as where Triton copies.
"""

import dataclasses

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import (
    async_copy,
    async_load,
    constexpr_function,
    gl,
    gluon_jit,
    mbarrier,
)
from jaxkern.triton.delta_rule.gated_delta_rule.lower_rows import LINES, first_of
from jaxkern.triton.quant.fragments import barrier

COLUMNS = 64  # value columns of a program, and tokens of a chunk


@dataclasses.dataclass(frozen=True)
class Walk:
    """Shapes, and how many chunks are in shared memory."""

    tokens: int
    heads: int
    group: int
    h: int
    hv: int
    room: int  # for h
    scale: float
    stages: int
    together: int = 1  # blocks of value columns that a walk's program has
    packed: bool = False  # matrices lie as in lower_rows.py

    @property
    def chunks(self) -> int:
        return -(-self.tokens // 64)

    @property
    def lines(self) -> int:
        """Of 64 numbers, that T and P T take."""
        return LINES if self.packed else 2 * 64

    @property
    def blocks(self) -> int:
        return -(-self.hv // COLUMNS)

    @property
    def key_heads(self) -> int:
        return self.heads // self.group

    @property
    def value_blocks(self) -> int:
        """Blocks of value columns that one program has together, a power of 2."""
        return next_power_of_2(self.blocks)

    @property
    def keys(self) -> int:
        """From a token's row of keys to the next token's."""
        return self.key_heads * self.h

    @property
    def values(self) -> int:
        return self.heads * self.hv


@constexpr_function
def copies_layout(room, warps):
    """Of rows that are copied, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // room, room // 8], [warps, 1], [1, 0])


@constexpr_function
def along(layout, dim):
    """Of one of three dims."""
    first, last = [i for i in range(3) if i != dim]
    return gl.SliceLayout(first, gl.SliceLayout(last, layout))


@constexpr_function
def passes_layout(rows, room, warps):
    """The same by number of the copy, row of it and column."""
    passes = rows // (256 // room * warps)
    threads = [1, 256 // room, room // 8]
    return gl.BlockedLayout([passes, 1, 8], threads, [1, warps, 1], [2, 1, 0])


@constexpr_function
def rows_together(room, warps):
    """Rows that one such copy of all warps has."""
    return 256 // room * warps


@gluon_jit
def tokens_left(chunk, P: gl.constexpr):
    """From a chunk on; a constant where all are whole, so that masks fall away."""
    if P.tokens % 64 == 0:
        return 64
    else:
        return P.tokens - chunk * 64


@gluon_jit
def places(
    ptr,
    rows_left,
    first_column,
    STRIDE: gl.constexpr,
    WIDTH: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Pointers to rows of some columns, and which are in the array.

    A thread's rows are one address and constants: addresses of their own would spill.
    """
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = copies_layout(SHAPE[1], WARPS)
    PASSES: gl.constexpr = passes_layout(SHAPE[0], SHAPE[1], WARPS)
    ROWS: gl.constexpr = rows_together(SHAPE[1], WARPS)
    pass_ = gl.arange(0, SHAPE[0] // ROWS, along(PASSES, 0))[:, None, None]
    row = gl.arange(0, ROWS, along(PASSES, 1))[None, :, None]
    column = gl.arange(0, SHAPE[1], along(PASSES, 2))[None, None, :]
    at = ptr + (first_column + (row.to(gl.int64) * STRIDE + column))
    at = gl.reshape(at + pass_ * (ROWS * STRIDE), [SHAPE[0], SHAPE[1]])
    inside = gl.arange(0, SHAPE[0], gl.SliceLayout(1, L))[:, None] < rows_left
    if WIDTH % SHAPE[1] != 0:
        column = first_column + gl.arange(0, SHAPE[1], gl.SliceLayout(0, L))[None, :]
        inside = inside & (column < WIDTH)
    # what Triton forgets: eight numbers lie side by side, on 16 bytes
    at = gl.multiple_of(gl.max_contiguous(at, [1, 8]), [1, 16])
    return gl.convert_layout(at, L, assert_trivial=True), inside


@gluon_jit
def copy_rows(
    to, ptr, rows_left, first_column, STRIDE: gl.constexpr, WIDTH: gl.constexpr
):
    """Starts a copy to shared memory; zeros beyond the last row or column."""
    SHAPE: gl.constexpr = to.shape
    at, inside = places(ptr, rows_left, first_column, STRIDE, WIDTH, SHAPE)
    async_load(to, at, inside)


@gluon_jit
def lower_places(ptr, SECOND: gl.constexpr):
    """Pointers of four warps to T, or P T, the SECOND, as in lower_rows.py.

    And what is there. A pass is a row of blocks: a thread's rows are one address and
    constants.
    """
    L: gl.constexpr = copies_layout(64, 4)
    PASSES: gl.constexpr = passes_layout(64, 64, 4)
    pass_ = gl.arange(0, 4, along(PASSES, 0))[:, None, None]
    row = gl.arange(0, 16, along(PASSES, 1))[None, :, None]
    column = gl.arange(0, 64, along(PASSES, 2))[None, None, :]
    first = gl.where(pass_ == 0, first_of(0, SECOND), first_of(1, SECOND))
    first = gl.where(pass_ == 2, first_of(2, SECOND), first)
    first = gl.where(pass_ == 3, first_of(3, SECOND), first)
    at = gl.reshape(ptr + (row * 64 + column) + first, [64, 64])
    at = gl.multiple_of(gl.max_contiguous(at, [1, 8]), [1, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    return gl.convert_layout(at, L, assert_trivial=True), column // 16 <= row // 16


@gluon_jit
def copy_matrix(to, ptr, SECOND: gl.constexpr, P: gl.constexpr):
    """Starts a copy of T, or of P T, the SECOND; zeros above the diagonal's blocks."""
    if P.packed:
        at, inside = lower_places(ptr, SECOND)
        async_load(to, at, inside)
    else:
        copy_rows(to, ptr + SECOND * (64 * 64), 64, 0, 64, 64)


@gluon_jit
def store_rows(
    ptr, tile, rows_left, first_column, STRIDE: gl.constexpr, WIDTH: gl.constexpr
):
    SHAPE: gl.constexpr = tile.shape
    at, inside = places(ptr, rows_left, first_column, STRIDE, WIDTH, SHAPE)
    gl.store(at, tile.load(copies_layout(SHAPE[1], gl.num_warps())), inside)


@gluon_jit
def is_strong(beta):
    """As in gradients.py."""
    return gl.maximum(beta, -beta) >= 0.015625


@gluon_jit
def room_for(dtype: gl.constexpr, SHAPE: gl.constexpr):
    """Shared memory as matrix units read it."""
    return gl.allocate_shared_memory(dtype, SHAPE, gl.NVMMASharedLayout(128, 16, 2))


@gluon_jit
def room_for_vectors(S: gl.constexpr):
    """For four vectors of each of S chunks, as chunk_matrices leaves them."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [S, 256], PLAIN)


@gluon_jit
def copy_vectors(to, ptr):
    """Starts a copy of the four vectors of a chunk."""
    L: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    number = gl.arange(0, 256, L)
    async_load(to, ptr + number)


@gluon_jit
def ring(S: gl.constexpr, FILLERS: gl.constexpr = 128, READERS: gl.constexpr = 1):
    """Bars of S places: copies have come there; all has been read.

    FILLERS are threads that copy, READERS groups of warps that read.
    """
    come = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(come.index(i), count=FILLERS)
        mbarrier.init(read.index(i), count=READERS)
    return come, read


@gluon_jit
def wait_for_room(ring, turn):
    """Before the copies of a turn: places are filled one after the other."""
    _, read = ring
    S: gl.constexpr = read.shape[0]
    mbarrier.wait(read.index(turn % S), (turn // S + 1) % 2)


@gluon_jit
def will_come(ring, turn):
    """What was copied since the last call is all of a turn."""
    come, _ = ring
    S: gl.constexpr = come.shape[0]
    async_copy.mbarrier_arrive(come.index(turn % S), increment_count=False)


@gluon_jit
def wait_for_copies(ring, turn):
    come, _ = ring
    S: gl.constexpr = come.shape[0]
    mbarrier.wait(come.index(turn % S), turn // S % 2)


@gluon_jit
def was_read(ring, turn):
    """By all warps of a group, which have met since."""
    _, read = ring
    S: gl.constexpr = read.shape[0]
    mbarrier.arrive(read.index(turn % S), count=1)


@gluon_jit
def all_was_read(ring, turn):
    """Once all warps of the group that reads are here."""
    barrier()
    was_read(ring, turn)


@gluon_jit
def all_was_left(ring, turn):
    """Once all warps of a group are here, which leave results for another one."""
    come, _ = ring
    S: gl.constexpr = come.shape[0]
    barrier()
    mbarrier.arrive(come.index(turn % S), count=1)
