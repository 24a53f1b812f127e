"""Walsh-Hadamard transform of rows: one read, one write, sums in registers.

A bit of the index is a butterfly, a + b and a - b, which costs nothing but its two sums
where both elements are in one thread. Three layouts therefore take turns in having bits
of the index in registers, with an exchange through shared memory between two of them:

    load     few bits beside those that make the warps read whole lines
    middle   the rest
    store    the lowest bits, so that a thread writes 16 bytes, and the highest ones

For 8192 columns: 13 sums an element and two exchanges. Written in Gluon, in which
layouts are chosen and not inferred.
"""

from typing import Any

from jaxkern.triton.block_sizes import tuned
from jaxkern.triton.triton_call import (
    constexpr_function,
    gl,
    gluon_jit,
    like,
    sparse_call,
)
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

LONGEST = 32768  # a row must fit the registers of one multiprocessor


def unsupported(x: Any = None, dy: Any = None, **rest: Any) -> str | None:
    """A reason in words, or None."""
    rows = dy if x is None else x
    if rows.shape[-1] > LONGEST:
        return f"rows of {rows.shape[-1]} elements, above {LONGEST}, are too long"
    return "`x` is float8" if rows.dtype.itemsize == 1 else unsupported_anywhere(x=rows)


def tile_sizes(d: int, dtype) -> dict:
    """Of one program: whole rows, 64 elements a thread, 32 of 4 bytes."""
    tile = max(d, 4096)
    warps = tile // (1024 if dtype.itemsize == 4 else 2048)
    return tuned("fwht", d, dtype, {"TILE": tile, "num_warps": warps})


@constexpr_function
def butterfly_bits(D, TILE, ITEM, WARPS):
    """The bits of the index that the layouts for load, middle and store work on."""
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
def layouts(D, TILE, ITEM, WARPS):
    """For load, middle and store."""
    in_load, in_middle, _ = butterfly_bits(D, TILE, ITEM, WARPS)
    store = layout((), vector_bits(ITEM), TILE, WARPS)
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
    x, PHASE: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, ITEM: gl.constexpr
):
    COUNT: gl.constexpr = num_bits(PHASE, D, TILE, ITEM, gl.num_warps())
    for i in gl.static_range(COUNT):
        x = butterfly(x, bit(i, PHASE, D, TILE, ITEM, gl.num_warps()), TILE)
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
    grid = (-(-x.size // sizes["TILE"]),)
    return sparse_call(fwht_kernel, grid, given, {"y_ptr": like(x)}, constants | sizes)[
        0
    ]


def fwht_bwd(signs_before, signs_after, dy, *, scale):
    return fwht_fwd(dy, signs_after, signs_before, scale=scale)
