"""Walsh-Hadamard transform of rows: one read, one write, sums in registers.

A bit of the index is a butterfly, a + b and a - b, which costs nothing but its two sums
where both elements are in one thread. Three layouts therefore take turns in having bits
of the index in registers, with an exchange through shared memory between two of them:

    load     few bits beside those that make the warps read whole lines
    middle   the rest
    store    the lowest bits, so that a thread writes 16 bytes, and the highest ones

For 8192 columns: 13 sums an element and two exchanges. Written in Gluon, in which
layouts are chosen and not inferred.

Long rows of 16 bits need less of both. Their lowest bits are one product with a small
matrix of ones and minus ones, exact in float32, whose operand is loaded as it lies in
memory. All sums are made before the last exchange, so that it moves 2 bytes an element.
Two programs share a row of 32768: each adds or subtracts both halves, one of which the
caches hold, and makes its half of the result.
"""

from typing import Any

from jaxkern.gpu.triton_call import (
    constexpr_function,
    gl,
    gluon_jit,
    like,
    mma_v2,
    sparse_call,
)
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.turboquant.fwht import hadamard_matrix

LONGEST = 32768  # a row must fit the registers of one multiprocessor
# rows of 16 bits for which it is faster: {elements: (of a tile, bits of the product)}
BY_PRODUCTS = {8192: (8192, 5), 32768: (16384, 4)}


def unsupported(x: Any = None, dy: Any = None, **rest: Any) -> str | None:
    """A reason in words, or None."""
    rows = dy if x is None else x
    if rows.shape[-1] > LONGEST:
        return f"rows of {rows.shape[-1]} elements, above {LONGEST}, are too long"
    return "`x` is float8" if rows.dtype.itemsize == 1 else unsupported_anywhere(x=rows)


def tile_sizes(d: int, dtype) -> dict:
    """Of one program: 64 elements a thread, 32 of 4 bytes; whole rows, or by products.

    PRODUCT is the number of lowest bits that are left to a product.
    """
    if d in BY_PRODUCTS and dtype.itemsize == 2:
        tile, product = BY_PRODUCTS[d]
        return {"TILE": tile, "num_warps": tile // 2048, "PRODUCT": product}
    tile = max(d, 4096)
    warps = tile // (1024 if dtype.itemsize == 4 else 2048)
    return {"TILE": tile, "num_warps": warps}


@constexpr_function
def butterfly_bits(D, TILE, ITEM, WARPS, PRODUCT=0):
    """The bits of the index that the layouts for load, middle and store work on."""
    if PRODUCT:
        # what a product leaves in its lanes and warps: bits of the row of a matrix
        outside = PRODUCT + 4 + WARPS.bit_length() - 1
        work = range(PRODUCT, min(D, TILE).bit_length() - 1)
        beside = tuple(b for b in work if b == PRODUCT + 3 or b >= outside)
        return beside, tuple(b for b in work if b not in beside), ()
    bits, registers = TILE.bit_length() - 1, (TILE // (32 * WARPS)).bit_length() - 1
    vector = vector_bits(ITEM)
    work = range(D.bit_length() - 1)
    in_store = [b for b in work if b < vector or b >= bits - registers + vector]
    left = [b for b in work if b not in in_store]
    if len(left) <= registers:
        return (), tuple(left), tuple(in_store)
    pair = 1 if ITEM < 4 else 0
    in_load = [b for b in left if b >= 5 + pair][pair - registers :]
    in_middle = [b for b in left if b not in in_load]
    return tuple(in_load), tuple(in_middle), tuple(in_store)


@constexpr_function
def num_bits(PHASE, *sizes):
    return len(butterfly_bits(*sizes)[PHASE])


@constexpr_function
def bit(i, PHASE, *sizes):
    return butterfly_bits(*sizes)[PHASE][i]


@constexpr_function
def vector_bits(ITEM):
    """16 bytes of one thread."""
    return {4: 2, 2: 3, 1: 4}[ITEM]


@constexpr_function
def layout(BITS, LOWEST, TILE, WARPS):
    """BITS and the LOWEST ones in registers; where more fit, the highest ones too."""
    count = (TILE // (32 * WARPS)).bit_length() - 1
    mine = sorted({*range(LOWEST), *BITS})
    rest = [b for b in range(TILE.bit_length() - 1) if b not in mine]
    end = len(rest) - (count - len(mine))
    mine, rest = mine + rest[end:], rest[:end]
    bases = [[[1 << b] for b in part] for part in (mine, rest[:5], rest[5:])]
    return gl.DistributedLinearLayout(*bases, [], [TILE])


@constexpr_function
def layouts(D, TILE, ITEM, WARPS, PRODUCT=0):
    """For load, middle and store."""
    in_load, in_middle, _ = butterfly_bits(D, TILE, ITEM, WARPS, PRODUCT)
    store = layout((), vector_bits(ITEM), TILE, WARPS)
    if PRODUCT:  # a thread of it has columns 0, 1, 8, 9, ... of rows 0, 8, ...
        in_load = (0, *range(3, PRODUCT), PRODUCT + 3, *in_load)
        load = layout(in_load, 0, TILE, WARPS)
        if len(in_middle) == (TILE // (32 * WARPS)).bit_length() - 1:
            # a bit in common, so that the exchange of 2 bytes an element moves 4
            store = layout(in_middle[:1], vector_bits(ITEM), TILE, WARPS)
        return load, layout(in_middle, 0, TILE, WARPS), store
    load = layout(in_load, 1 if ITEM < 4 else 0, TILE, WARPS) if in_load else store
    middle = layout(in_middle, 0, TILE, WARPS) if in_middle else load
    return load, middle, store


@gluon_jit
def butterfly(x, BIT: gl.constexpr, TILE: gl.constexpr):
    """a + b and a - b of the pairs along a bit of the index, in the layout of x."""
    STRIDE: gl.constexpr = 1 << BIT
    pairs = gl.reshape(x, [TILE // (2 * STRIDE), 2, STRIDE])
    a, b = gl.split(gl.permute(pairs, (0, 2, 1)))
    pairs = gl.permute(gl.join(a + b, a - b), (0, 2, 1))
    return gl.convert_layout(gl.reshape(pairs, [TILE]), x.type.layout)


@gluon_jit
def butterflies(
    x,
    PHASE: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,
    ITEM: gl.constexpr,
    PRODUCT: gl.constexpr = 0,
):
    WARPS: gl.constexpr = gl.num_warps()
    COUNT: gl.constexpr = num_bits(PHASE, D, TILE, ITEM, WARPS, PRODUCT)
    for i in gl.static_range(COUNT):
        x = butterfly(x, bit(i, PHASE, D, TILE, ITEM, WARPS, PRODUCT), TILE)
    return x


@gluon_jit
def transformed(
    x_ptr,
    signs_ptr,
    SIZE: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,
    ITEM: gl.constexpr,
):
    """H_D diag(signs) of each row in this program's tile, in the layout for stores."""
    PLAN: gl.constexpr = layouts(D, TILE, ITEM, gl.num_warps())
    at = gl.arange(0, TILE, PLAN[0])
    start = gl.program_id(0).to(gl.int64) * TILE
    if SIZE % TILE == 0:
        x = gl.load(x_ptr + start + at, eviction_policy="evict_first")
    else:
        inside = at < SIZE - start
        x = gl.load(x_ptr + start + at, inside, 0.0, eviction_policy="evict_first")
    x = x.to(gl.float32)
    if signs_ptr is not None:
        signs = gl.load(signs_ptr + at % D, eviction_policy="evict_last")
        x = x * signs.to(gl.float32)
    return in_three_phases(x, D, TILE, ITEM)


@gluon_jit
def in_three_phases(x, D: gl.constexpr, TILE: gl.constexpr, ITEM: gl.constexpr):
    """H_D x, from the layout for loads to that for stores."""
    PLAN: gl.constexpr = layouts(D, TILE, ITEM, gl.num_warps())
    x = butterflies(x, 0, D, TILE, ITEM)
    x = butterflies(gl.convert_layout(x, PLAN[1]), 1, D, TILE, ITEM)
    return butterflies(gl.convert_layout(x, PLAN[2]), 2, D, TILE, ITEM)


@gluon_jit
def fwht_kernel(
    x_ptr,
    before_ptr,
    after_ptr,
    y_ptr,
    SIZE: gl.constexpr,
    D: gl.constexpr,
    SCALE: gl.constexpr,
    TILE: gl.constexpr,
    ITEM: gl.constexpr,
):
    y = transformed(x_ptr, before_ptr, SIZE, D, TILE, ITEM)
    if SCALE != 1.0:
        y = y * SCALE
    at = gl.arange(0, TILE, y.type.layout)
    if after_ptr is not None:
        signs = gl.load(after_ptr + at % D, eviction_policy="evict_last")
        y = y * signs.to(gl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    start = gl.program_id(0).to(gl.int64) * TILE
    if SIZE % TILE == 0:
        gl.store(y_ptr + start + at, y, eviction_policy="evict_first")
    else:
        inside = at < SIZE - start
        gl.store(y_ptr + start + at, y, inside, eviction_policy="evict_first")


@gluon_jit
def fwht_by_products_kernel(
    x_ptr,
    before_ptr,
    after_ptr,
    factor_ptr,
    y_ptr,
    D: gl.constexpr,
    SCALE: gl.constexpr,
    TILE: gl.constexpr,
    ITEM: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """D is one tile, or two of which each is the work of a program."""
    PARTS: gl.constexpr = D // TILE
    WIDTH: gl.constexpr = 2**PRODUCT
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, WIDTH // 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, WIDTH // 4)
    PLAN: gl.constexpr = layouts(D, TILE, ITEM, gl.num_warps(), PRODUCT)
    # the caches keep what other programs read too
    POLICY: gl.constexpr = "evict_first" if PARTS == 1 else "evict_last"
    part = gl.program_id(0) % PARTS
    start = (gl.program_id(0) // PARTS).to(gl.int64) * D

    i = gl.arange(0, WIDTH, gl.SliceLayout(1, RIGHT))[:, None]
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, RIGHT))[None, :]
    factor = gl.load(factor_ptr + j * WIDTH + i, eviction_policy="evict_last")
    i = gl.arange(0, TILE // WIDTH, gl.SliceLayout(1, LEFT))[:, None]
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, LEFT))[None, :]
    y = gl.zeros([TILE // WIDTH, WIDTH], gl.float32, SUMS)
    for other in gl.static_range(PARTS):
        at = other * TILE + i * WIDTH + j
        x = gl.load(x_ptr + start + at, eviction_policy=POLICY)
        if before_ptr is not None:  # ones and minus ones: exact
            signs = gl.load(before_ptr + at, eviction_policy="evict_last")
            x = x * signs.to(x.dtype)
        y = mma_v2(x, gl.where((part & other) == 1, -factor, factor), y)

    y = gl.convert_layout(gl.reshape(y, [TILE]), PLAN[0])
    y = butterflies(y, 0, D, TILE, ITEM, PRODUCT)
    y = gl.convert_layout(y, PLAN[1])
    y = butterflies(y, 1, D, TILE, ITEM, PRODUCT)
    if SCALE != 1.0:
        y = y * SCALE
    y = gl.convert_layout(y.to(y_ptr.dtype.element_ty), PLAN[2])
    at = part * TILE + gl.arange(0, TILE, PLAN[2])
    if after_ptr is not None:
        signs = gl.load(after_ptr + at, eviction_policy="evict_last")
        y = y * signs.to(y.dtype)
    gl.store(y_ptr + start + at, y, eviction_policy="evict_first")


def fwht_fwd(x, signs_before, signs_after, *, scale):
    d = x.shape[-1]
    sizes = tile_sizes(d, x.dtype)
    given = {"x_ptr": x, "before_ptr": signs_before, "after_ptr": signs_after}
    constants = {
        "SIZE": x.size,
        "D": d,
        "SCALE": d**-0.5 if scale == "orthonormal" else 1.0,
        "ITEM": x.dtype.itemsize,
    }
    kernel = fwht_kernel
    if "PRODUCT" in sizes:
        kernel = fwht_by_products_kernel
        given["factor_ptr"] = hadamard_matrix(2 ** sizes["PRODUCT"], x.dtype)
        del constants["SIZE"]
    grid = (-(-x.size // sizes["TILE"]),)
    [y] = sparse_call(kernel, grid, given, {"y_ptr": like(x)}, constants | sizes)
    return y


def fwht_bwd(signs_before, signs_after, dy, *, scale):
    return fwht_fwd(dy, signs_after, signs_before, scale=scale)
