"""Tiles of whole rows: how large they are, how they are read and written.

A forward program reads its rows in chunks, once for the statistics and once more, then
mostly from the caches, to write the results. A backward program keeps its rows in
registers, walks over many of them, and holds the sums that gradients of weights are.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import WARP, next_power_of_2, num_programs, num_sms
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import constexpr_function, jit, max_shared_bytes, tl
from jaxkern.triton.norm.split_rows import alone, split_walk

NARROW = 1024  # a row up to here is one chunk, and several rows are a tile
FULL = 4096  # a row up to here leaves registers for what loads meanwhile
WAVES = 4  # programs of a multiprocessor that walk down stripes
PREFETCH = True  # a program's next row


def forward_tile(rows: int, d: int, small: int | None = None) -> dict:
    """About 16 elements a thread; large chunks, with little waste for odd d.

    Or `small` chunks by 4 warps: twice as many programs, each with less to wait for.
    """
    block, together = next_power_of_2(d), 1
    if d <= NARROW:
        together = max(1, min(2048 // block, next_power_of_2(rows)))
        warps = max(together * block // (16 * WARP), 1)
    elif small is not None:
        block, warps = small, 4
    else:
        block = 16384 if d > 65536 else 4096 if d > 2048 else 1024
        warps = block // 512 if d < 8192 else max(16, block // 512)
    sizes = {"BLOCK": block, "ROWS": together, "num_warps": warps}
    return sizes | {"NUM_ROWS": rows, "D": d}


def backward_tile(x: jax.Array, streams: int, elements: int, stages: int) -> dict:
    """One program a multiprocessor, with further tiles loading where they fit.

    Args:
      x: an operand.
      streams: how many tensors and vectors the kernel reads.
      elements: of one tile; at least a row.
      stages: tiles in flight, the one in registers included, where they fit.
    """
    rows, d = num_rows(x), x.shape[-1]
    block = next_power_of_2(d)
    together = max(1, min(elements // block, next_power_of_2(rows)))
    tile_bytes = together * block * x.dtype.itemsize * streams
    while (stages - 1) * tile_bytes > max_shared_bytes() - 2048:
        stages -= 1
    sizes = {
        "BLOCK": block,
        "ROWS": together,
        "WAVES": 1,
        "STAGES": stages,
        "num_warps": min(16, max(1, together * block // 256)),
    }
    programs = num_programs(-(-rows // sizes["ROWS"]), sizes.pop("WAVES"))
    return sizes | {"NUM_ROWS": rows, "D": d, "PROGRAMS": programs}


def backward_sizes(
    x: jax.Array,
    *,
    streams: int,
    sums: int,
    elements: int,
    longest: int,
    most: int,
) -> tuple[dict, int]:
    """Sizes of a backward pass at any row length, and how many stripes of columns.

    A short row is one chunk, in registers. A long one is read twice, in chunks, as long
    as registers hold its sums. Beyond, programs walk down stripes of columns, and means
    along rows are known before.

    Args:
      x, streams: as of `backward_tile`.
      sums: how many vectors have gradients.
      elements: of a tile of short rows.
      longest: columns of a short row.
      most: elements of the sums of a row that is read twice.
    """
    rows, d = num_rows(x), x.shape[-1]
    if split := split_walk(x):
        return split | {"D": d, "CHUNKS": 1, "PREFETCH": False}, 1
    idle = d > FULL and 5 * d <= 4 * next_power_of_2(d)
    if d <= longest and not idle:
        stages, short = 3 if d <= FULL else 2, {"CHUNKS": 1, "PREFETCH": False}
        short |= alone()
        return backward_tile(x, streams, elements, stages) | short, 1
    if d <= 16384 and d * sums <= most:
        if d * x.dtype.itemsize % 16:  # loads of one element: many warps for them
            block, warps, waves = 1024, 16, 1
        elif d <= 8192:
            block, warps, waves = 2048, 8, 2
        else:
            block, warps, waves = (4096, 16, 1) if sums < 2 else (2048, 8, 1)
        sizes = {"BLOCK": block, "WAVES": waves, "num_warps": warps}
        sizes |= {"PREFETCH": PREFETCH, "ROWS": 1, "STAGES": 1}
        chunks = -(-d // sizes["BLOCK"])
        programs, stripes = num_programs(rows, sizes.pop("WAVES")), 1
    else:
        room = max_shared_bytes() // WAVES
        tile_bytes = 2048 * x.dtype.itemsize * streams
        stages = max(1, min(3, 1 + room // tile_bytes))
        sizes = {"BLOCK": 1024, "ROWS": 2, "STAGES": stages, "num_warps": 4}
        sizes |= {"PREFETCH": False}
        chunks = 1
        stripes, blocks = -(-d // sizes["BLOCK"]), -(-rows // sizes["ROWS"])
        programs = max(1, min(WAVES * num_sms() // stripes, blocks))
    plan = {"NUM_ROWS": rows, "D": d, "CHUNKS": chunks, "PROGRAMS": programs}
    return sizes | plan | alone(), stripes


def means_sizes(x: jax.Array) -> dict:
    """A program a row, in chunks, where only means along rows are wanted."""
    return {"BLOCK": 4096, "num_warps": 16, "D": x.shape[-1]}


def per_row(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:-1], 1), jnp.float32)


def summed(partial: jax.Array | None, like: jax.Array | None) -> jax.Array | None:
    """The sum over programs, in the dtype of `like`."""
    if partial is None or like is None:
        return None
    total = partial[0] if len(partial) == 1 else partial.sum(0)
    return total.astype(like.dtype)


def partial_sums(
    programs: int, d: int, like: jax.Array | None
) -> jax.ShapeDtypeStruct | None:
    """Where programs leave parts of a gradient; one leaves the gradient itself."""
    if like is None:
        return None
    whole = programs == 1 and like.size == d
    return jax.ShapeDtypeStruct((programs, d), like.dtype if whole else jnp.float32)


@jit
def read(ptr, at, mask):
    """Loads what no program reads again: it is the first to leave the caches."""
    return tl.load(ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)


@jit
def read_and_keep(ptr, at, mask):
    """Loads what is soon read again: it is the last to leave the caches."""
    return tl.load(ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)


@jit
def read_each(ptrs, COUNT: tl.constexpr, at, mask, AGAIN: tl.constexpr):
    """Tiles of several tensors as they are stored, to be read again soon if `AGAIN`."""
    tiles = ()
    for i in tl.static_range(COUNT):
        if ptrs[i] is None:
            tiles = tiles + (0.0,)
        elif AGAIN:
            tile = tl.load(ptrs[i] + at, mask, 0.0, eviction_policy="evict_last")
            tiles = tiles + (tile,)
        else:
            tile = tl.load(ptrs[i] + at, mask, 0.0, eviction_policy="evict_first")
            tiles = tiles + (tile,)
    return tiles


@jit
def as_float32(tiles):
    wide = ()
    for i in tl.static_range(len(tiles)):
        wide = wide + (tiles[i].to(tl.float32),)
    return wide


@constexpr_function
def num_lines(bits, d):
    """Cache lines of a row, rounded up to a power of 2."""
    return 1 << ((d * bits + 1023) // 1024 - 1).bit_length()


@jit
def prefetch_row(ptr, row, D: tl.constexpr):
    """Asks for a row to be in the L2 cache soon."""
    bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, num_lines(bits, D))
    at = row * D + tl.minimum(line * (1024 // bits), D - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(ptr + at).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def prefetch_rows(ptrs, COUNT: tl.constexpr, row, D: tl.constexpr):
    for i in tl.static_range(COUNT):
        if ptrs[i] is not None:
            prefetch_row(ptrs[i], row, D)


@jit
def write(ptr, at, value, mask):
    """Stores; where the result is not wanted, nothing happens."""
    if ptr is not None:
        tl.store(ptr + at, value, mask, eviction_policy="evict_first")


@jit
def factor(weight_ptr, columns, inside, OFFSET: tl.constexpr):
    """What the norm is multiplied by; 1 without a weight."""
    if weight_ptr is None:
        return 1.0
    else:
        return tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32) + OFFSET


@jit
def read_scale(scale_ptr, columns, inside, STRIDE: tl.constexpr):
    """The factor of a sum: one number or a vector; 1 without."""
    if scale_ptr is None:
        return 1.0
    else:
        return tl.load(scale_ptr + columns * STRIDE, inside, 0.0).to(tl.float32)
