"""Stable radix sort of (key, index) by digits of 8 bits, the lowest first.

    x[indices[0]] <= x[indices[1]] <= ...        of rows `[..., v]`, equal ones in order

A row of one tile is sorted by one program in shared memory. Of a longer row every digit
takes three launches:

    counts    how many elements of each tile have each digit
    offsets   the same of all tiles before; where tiles are few the next launch adds
    scatter   a tile sorts its elements by the digit in shared memory, so that they go
              to memory in runs, to where its elements of that digit begin

The first digit reads x, the last one writes indices only.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2, num_sms
from jaxkern.gpu.triton_call import sparse_call, triton_call
from jaxkern.triton.index.radix import BITS, DIGITS, SUMS
from jaxkern.triton.index.radix_kernels import (
    counts_kernel,
    offsets_kernel,
    scatter_kernel,
    sort_row_kernel,
)

SHORTEST = 64  # rows that XLA does not sort as fast
LONGEST_TILE = 8192  # a row of one program
LONGER_ROWS = (12_288, 16_384)  # by one program each where they are many
LONGER_BYTES = 163_968  # its shared memory
FEW_TILES = 64  # of a row: each adds the counts of all itself
GROUP = 8  # digits of one program that adds tiles
COPIES = 8  # of the counts of a tile: lanes with the same digit collide
INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


def unsupported(*, x: Any, **named: Any) -> str | None:
    if x.dtype.name not in INFINITY:
        return f"`x` is {x.dtype.name}"
    return bridge.unsupported(x=x, **named)


def slower(*, x: Any, **_: Any) -> str | None:
    v = x.shape[-1]
    return f"XLA is as fast for rows of {v} elements" if v < SHORTEST else None


def argsort(x: jax.Array, *, descending: bool, nan_policy: str) -> jax.Array:
    if x.size == 0:
        return jnp.zeros(x.shape, jnp.int32)
    nan_first = descending and nan_policy == "propagate"
    key = INFINITY[x.dtype.name], descending, nan_first
    v = x.shape[-1]
    sort = sorted_rows if one_tile(x.size // v, v) else sorted_by_tiles
    return sort(x, key)


def one_tile(rows: int, v: int) -> bool:
    """Whether one program sorts a row."""
    least, most = LONGER_ROWS
    longer = rows >= num_sms() and bridge.max_shared_bytes() >= LONGER_BYTES
    return v <= LONGEST_TILE or (longer and least < v <= most)


def sorted_rows(x: jax.Array, key: tuple) -> jax.Array:
    """By one launch, a program a row."""
    v = x.shape[-1]
    tile = max(next_power_of_2(v), 32)
    run = min(16 if tile > 1024 else 8, tile // 32)
    [index] = triton_call(
        sort_row_kernel,
        x,
        out=[jax.ShapeDtypeStruct(x.shape, jnp.int32)],
        grid=(x.size // v,),
        num_warps=tile // (32 * run),
        V=v,
        RUN=run,
        WIDTH=8 * x.dtype.itemsize,
        BITS=BITS,
        KEY=key,
        DIGITS=DIGITS,
        SUMS=SUMS,
    )
    return index


def sorted_by_tiles(x: jax.Array, key: tuple) -> jax.Array:
    """A radix sort, the lowest digit first: counts of each tile, then a scatter."""
    v, width = x.shape[-1], 8 * x.dtype.itemsize
    rows = x.size // v
    # long runs, unless that leaves multiprocessors idle
    sizes = {"num_warps": 8, "RUN": 16 if 2 * rows * (v // 4096) >= num_sms() else 8}
    tile = 32 * sizes["RUN"] * sizes["num_warps"]
    tiles = -(-v // tile)
    keys = jax.ShapeDtypeStruct(x.shape, f"uint{width}")
    indices = jax.ShapeDtypeStruct(x.shape, jnp.int32)
    source: Any = x
    index: Any = None
    order: tuple | None = key
    for shift in range(0, width, BITS):
        digit = {"V": v, "TILES": tiles, "SHIFT": shift, "KEY": order, "DIGITS": DIGITS}
        [counts] = triton_call(
            counts_kernel,
            source,
            out=[jax.ShapeDtypeStruct((rows, tiles, DIGITS), jnp.int32)],
            grid=(rows * tiles,),
            num_warps=8,
            TILE=tile,
            COPIES=COPIES,
            **digit,
        )
        offsets, totals = over_tiles(counts)
        last = shift + BITS == width
        source, index = sparse_call(
            scatter_kernel,
            (rows * tiles,),
            {
                "source_ptr": source,
                "index_ptr": index,
                "counts_ptr": offsets,
                "totals_ptr": totals,
            },
            {"out_key_ptr": None if last else keys, "out_index_ptr": indices},
            digit | {"SUMS": SUMS} | sizes,
        )
        order = None
    return index


def over_tiles(counts: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Sums over the tiles before each and over all; of few the counts, and None."""
    rows, tiles, _ = counts.shape
    if tiles <= FEW_TILES and rows * tiles <= num_sms():
        return counts, None
    offsets, totals = triton_call(
        offsets_kernel,
        counts,
        out=[counts, jax.ShapeDtypeStruct((rows, DIGITS), jnp.int32)],
        grid=(rows * (DIGITS // GROUP),),
        num_warps=8,
        TILES=tiles,
        BLOCK=min(next_power_of_2(tiles), 1024),
        GROUP=GROUP,
        DIGITS=DIGITS,
    )
    return offsets, totals
