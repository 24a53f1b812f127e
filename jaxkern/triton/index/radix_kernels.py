"""Kernels of a stable radix sort of (key, index); see argsort.py."""

from jaxkern.gpu.triton_call import gl, gluon_jit, jit, tl
from jaxkern.triton.index.radix import (
    barrier,
    clear,
    counts_to_places,
    line_layout,
    load_pair,
    load_shared,
    places,
    places_of_lanes,
    ranks,
    shared_memory,
    store_pair,
    store_shared,
)


@gluon_jit
def sort_key(x, inside, KEY: gl.constexpr):
    """Unsigned integers in the order asked for; what is outside comes last.

    KEY: (infinity's bits, descending, NaN comes first) of floats, None of keys.
    """
    WIDTH: gl.constexpr = x.dtype.primitive_bitwidth
    ALL: gl.constexpr = 2**WIDTH - 1
    if KEY is None:
        key = x.to(gl.uint32)
    else:
        if WIDTH == 32:
            bits = x.to(gl.uint32, bitcast=True)
        else:
            bits = x.to(gl.uint16, bitcast=True).to(gl.uint32)
        HALF: gl.constexpr = ALL // 2
        size = bits & HALF
        below = (bits != size) & (size != 0)
        key = gl.where(below, HALF - size, size + (HALF + 1))
        if KEY[1]:
            key = key ^ ALL
        key = gl.where(size > KEY[0], 0 if KEY[2] else ALL, key)
    return gl.where(inside, key, ALL).to(gl.uint32)


@gluon_jit
def digit_of(key, SHIFT: gl.constexpr, DIGITS: gl.constexpr):
    return ((key >> SHIFT) & (DIGITS - 1)).to(gl.int32)


@gluon_jit
def counts_kernel(
    source_ptr,
    counts_ptr,
    V: gl.constexpr,
    TILES: gl.constexpr,
    TILE: gl.constexpr,
    SHIFT: gl.constexpr,
    KEY: gl.constexpr,
    DIGITS: gl.constexpr,
    COPIES: gl.constexpr,
):
    """Elements of each digit in a tile."""
    W: gl.constexpr = gl.num_warps()
    program = gl.program_id(0)
    row = (program // TILES).to(gl.int64)
    at = program % TILES * TILE + gl.arange(
        0, TILE, gl.BlockedLayout([4], [32], [W], [0])
    )
    inside = at < V
    key = sort_key(gl.load(source_ptr + row * V + at, inside, 0), inside, KEY)
    memory, base = shared_memory(DIGITS * COPIES)
    clear(base, DIGITS * COPIES)
    base = barrier(base)
    slot = digit_of(key, SHIFT, DIGITS) * COPIES + at // 4 % COPIES
    gl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], $2; mov.b32 $0, $1;",
        "=r,r,r",
        [base + slot * 4, inside.to(gl.int32)],
        gl.int32,
        False,
        1,
    )
    base = barrier(base)
    d = gl.arange(0, DIGITS, line_layout(W))
    count = gl.zeros_like(d)
    for k in gl.static_range(COPIES):
        # lanes begin at different copies, or they would meet in a bank
        count += load_shared(base + (d * COPIES + (d // 4 + k) % COPIES) * 4)
    memory._keep_alive()
    gl.store(counts_ptr + program.to(gl.int64) * DIGITS + d, count)


@jit
def offsets_kernel(
    counts_ptr,
    offsets_ptr,
    totals_ptr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Of GROUP digits: how many are in the tiles before each tile, and in the row."""
    row = tl.program_id(0) // (DIGITS // GROUP)
    digit = tl.program_id(0) % (DIGITS // GROUP) * GROUP + tl.arange(0, GROUP)
    before = tl.zeros([GROUP], tl.int32)
    for first in range(0, TILES, BLOCK):
        tile = first + tl.arange(0, BLOCK)[:, None]
        at = (row.to(tl.int64) * TILES + tile) * DIGITS + digit[None, :]
        count = tl.load(counts_ptr + at, tile < TILES, 0)
        through = tl.cumsum(count, 0) + before[None, :]
        tl.store(offsets_ptr + at, through - count, tile < TILES)
        before += tl.sum(count, 0)
    tl.store(totals_ptr + row * DIGITS + digit, before)


@gluon_jit
def scatter_kernel(
    source_ptr,
    index_ptr,
    counts_ptr,
    totals_ptr,
    out_key_ptr,
    out_index_ptr,
    V: gl.constexpr,
    TILES: gl.constexpr,
    RUN: gl.constexpr,
    SHIFT: gl.constexpr,
    KEY: gl.constexpr,
    DIGITS: gl.constexpr,
    SUMS: gl.constexpr,
):
    """The pairs of a tile to where its elements of each digit begin in the row.

    counts: of each tile or, with the totals of the rows, of all tiles before it.
    """
    W: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = W * RUN * 32
    program = gl.program_id(0)
    begin = program % TILES * TILE
    row = (program // TILES).to(gl.int64)
    warp, place = places_of_lanes(W, RUN)
    at = begin + place
    inside = at < V
    source_ptr += row * V
    key = sort_key(gl.load(source_ptr + at, inside, 0), inside, KEY)
    d = gl.arange(0, DIGITS, line_layout(W))
    counts_ptr += row * (TILES * DIGITS) + d
    offsets = gl.zeros_like(d)
    totals = gl.zeros_like(d)
    if totals_ptr is None:
        for tile in gl.static_range(TILES):
            count = gl.load(counts_ptr + tile * DIGITS)
            totals += count
            offsets += gl.where(tile < program % TILES, count, 0)
    else:
        totals = gl.load(totals_ptr + row * DIGITS + d)
        offsets = gl.load(counts_ptr + program % TILES * DIGITS)

    # counts of warps, 2 * SUMS and padding, where digits go, the tile
    FIRST: gl.constexpr = W * DIGITS + 32
    memory, base = shared_memory(FIRST + DIGITS + 2 * TILE)
    to = base + FIRST * 4
    pairs = to + DIGITS * 4
    rank = ranks(digit_of(key, SHIFT, DIGITS), warp, base, DIGITS)
    # not before: registers are scarce
    if index_ptr is None:
        index = at
    else:
        index = gl.load(index_ptr + row * V + at, inside, 0)
    start, row_start = counts_to_places(base, totals, DIGITS, SUMS)
    store_shared(to + d * 4, row_start + offsets - start)
    store_pair(pairs + places(rank) * 8, key, index)
    pairs = barrier(pairs)
    p = gl.arange(0, TILE, line_layout(W))
    key, index = load_pair(pairs + p * 8)
    target = p + load_shared(to + digit_of(key, SHIFT, DIGITS) * 4)
    memory._keep_alive()
    present = p < V - begin
    if out_key_ptr is not None:
        out_key_ptr += row * V
        gl.store(out_key_ptr + target, key.to(out_key_ptr.dtype.element_ty), present)
    out_index_ptr += row * V
    gl.store(out_index_ptr + target, index, present)


@gluon_jit
def sort_row_kernel(
    x_ptr,
    index_ptr,
    V: gl.constexpr,
    RUN: gl.constexpr,
    WIDTH: gl.constexpr,
    BITS: gl.constexpr,
    KEY: gl.constexpr,
    DIGITS: gl.constexpr,
    SUMS: gl.constexpr,
):
    """A row of one tile: every digit in shared memory."""
    W: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = W * RUN * 32
    row = gl.program_id(0).to(gl.int64)
    warp, place = places_of_lanes(W, RUN)
    inside = place < V
    key = sort_key(gl.load(x_ptr + row * V + place, inside, 0), inside, KEY)
    index = place
    FIRST: gl.constexpr = W * DIGITS + 32
    memory, base = shared_memory(FIRST + 2 * TILE)
    pairs = base + FIRST * 4
    for shift in gl.static_range(0, WIDTH, BITS):
        rank = ranks(digit_of(key, shift, DIGITS), warp, base, DIGITS)
        counts_to_places(base, None, DIGITS, SUMS)
        store_pair(pairs + places(rank) * 8, key, index)
        pairs = barrier(pairs)
        key, index = load_pair(pairs + place * 8)
    memory._keep_alive()
    gl.store(index_ptr + row * V + place, index, inside)
