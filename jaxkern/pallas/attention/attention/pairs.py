"""What attention is told of every pair of a query and a key: mask and bias.

A boolean mask becomes bits, 32 columns of a row in one word. A warpgroup holds a tile
of scores by rows, so a word serves 32 of them; as bytes the same mask would be read in
32 pieces. `[b|1, n|1, words, rows]` lets the words of a tile's rows lie side by side.

A bias is read as it is, from where it is: four threads take 16 or 32 bytes of a row.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from jaxkern.gpu.attention.visible import block_ranges

BITS = 32
LOG2_E = math.log2(math.e)
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def mask_words(
    mask: Bool[Array, "#b #n #t #s"], t: int, s: int, block_t: int, block_s: int
) -> Int32[Array, "#b #n words rows"]:
    """Words along s; rows and words fill whole blocks, of bits that are not set."""
    assert block_s % BITS == 0  # a block begins with a word
    rows, columns = -(-t // block_t) * block_t, -(-s // block_s) * block_s
    if mask.shape[3] == 1:
        mask = jnp.broadcast_to(mask, (*mask.shape[:3], s))
    bits = jnp.pad(mask, [(0, 0), (0, 0), (0, 0), (0, columns - s)])
    bits = bits.reshape(*bits.shape[:3], columns // BITS, BITS).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(BITS, dtype=jnp.uint32), -1, dtype=jnp.uint32)
    words = jnp.moveaxis(lax.bitcast_convert_type(words, jnp.int32), 2, 3)
    if words.shape[3] == 1:
        words = jnp.broadcast_to(words, (*words.shape[:3], t))
    return jnp.pad(words, [(0, 0), (0, 0), (0, 0), (0, rows - t)])


def word_bounds(
    words: Int32[Array, "#b #n words rows"], b: int, block_t: int, block_s: int
) -> Int32[Array, "b blocks 4"]:
    """The blocks of columns that the rows of a block see in any head, as `ranges`."""
    per_block = block_s // BITS
    blocks = words.reshape(
        *words.shape[:2], words.shape[2] // per_block, per_block, -1, block_t
    )
    meet = jnp.moveaxis(jnp.any(blocks != 0, (1, 3, 5)), 1, 2)
    same = jnp.moveaxis(jnp.all(blocks == -1, (1, 3, 5)), 1, 2)
    bounds = block_ranges(meet, same)
    return jnp.broadcast_to(bounds, (b, *bounds.shape[1:]))


def inside_both(bounds: jax.Array | None, others: jax.Array | None) -> jax.Array | None:
    """Blocks [first, last) of both, and those that both show entirely."""
    if bounds is None or others is None:
        return others if bounds is None else bounds
    first, whole, whole_end, last = jnp.moveaxis(jnp.stack([bounds, others]), -1, 0)
    return jnp.stack(
        [jnp.max(first, 0), jnp.max(whole, 0), jnp.min(whole_end, 0), jnp.min(last, 0)],
        -1,
    )


def is_set(words_ref: Any, batch: Any, head: Any, row: Any, column: Any, shape: Any):
    """[rows, columns] of a tile: which pairs see each other.

    `column` is a multiple of 32 and the tile's width too.
    """
    batch, head = own(words_ref, batch, head)
    columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)

    def load(i):
        at = lax.div(column, jnp.int32(BITS)) + i
        words = words_ref.at[batch, head, at, pl.ds(row, shape[0])]
        words = plgpu.load(words, layout=BY_ROW, optimized=False)
        return lax.broadcast_in_dim(words, shape, [0])

    last = shape[1] // BITS - 1
    word = load(last)
    for i in reversed(range(last)):
        word = jnp.where(columns < BITS * (i + 1), load(i), word)
    bit = lax.shift_left(jnp.int32(1), columns & (BITS - 1))
    return (word & bit) != 0


def whole_blocks(
    bias: Float[Array, "#b #n #t #s"], block_t: int, block_s: int
) -> Float[Array, "#b #n #rows #columns"]:
    """Zeros behind it; a dim of 1 stays, for all rows or columns alike."""
    short = [
        0 if size == 1 else -size % block
        for size, block in zip(bias.shape[2:], (block_t, block_s), strict=True)
    ]
    return jnp.pad(bias, [(0, 0), (0, 0), *((0, n) for n in short)])


def bias_tile(bias_ref: Any, batch: Any, head: Any, row: Any, column: Any, shape: Any):
    """[rows, columns] of a tile in float32."""
    batch, head = own(bias_ref, batch, head)
    one_row, one_column = (n == 1 for n in bias_ref.shape[2:])
    rows = 0 if one_row else pl.ds(row, shape[0])
    columns = 0 if one_column else pl.ds(column, shape[1])
    source = bias_ref.at[batch, head, rows, columns]
    if one_row and one_column:
        return source[()].astype(jnp.float32)
    dims = [0] if one_column else [1] if one_row else [0, 1]
    layout = BY_ROW if one_column else BY_COLUMN if one_row else plgpu.Layout.WGMMA
    tile = plgpu.load(source, layout=layout, optimized=False)
    return lax.broadcast_in_dim(tile.astype(jnp.float32), shape, dims)


def pair_bytes(bias: Any) -> int:
    """Of what one pair has of a bias, 0 where pairs share it or there is none."""
    return 0 if bias is None or 1 in bias.shape[2:] else bias.dtype.itemsize


def bias_tiles(dtype: Any, *shape: int) -> Any:
    """Shared memory that threads read and write by the tiles of their registers."""
    tiling: Any = plgpu.TilingTransform  # abstract only to a type checker
    swizzling: Any = plgpu.SwizzleTransform
    transforms = tiling((8, 128 // dtype.itemsize)), swizzling(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def copied_bias(tile: Any, turned: bool = False):
    """[rows, columns] of a tile in shared memory, or transposed; as `bias_tile`."""
    if turned:
        layout = plgpu.Layout.WGMMA_TRANSPOSED
        tile = plgpu.load(tile.transpose((1, 0)), layout=layout)
        tile = plgpu.layout_cast(tile, plgpu.Layout.WGMMA)
    else:
        tile = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
    return tile.astype(jnp.float32)


def own(ref: Any, batch: Any, head: Any) -> tuple[Any, Any]:
    """Indices of [b|1, n|1, ...]."""
    return batch if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0
