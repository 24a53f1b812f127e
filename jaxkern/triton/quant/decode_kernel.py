"""Packed rows as floats: whole weights for many activations, or rows that ids name.

w = scale * (code - zero) + offset, in float32, rounded once
"""

from jaxkern.gpu.triton_call import gl, gluon_jit
from jaxkern.triton.quant.block_codes import (
    codes_of,
    fragments_of_scale,
    has_offsets,
    is_signed,
    read_step,
    scales_of,
    zero_of,
)
from jaxkern.triton.quant.fragments import as_pair, byte_as_float


@gluon_jit
def weight(word, AT: gl.constexpr, scale, offset, FORMAT: gl.constexpr):
    """The weight of code AT in the bytes of a word."""
    if is_signed(FORMAT):
        w = scale * (byte_as_float(word ^ -0x7F7F7F80, AT) - 8388736.0)
    else:
        w = scale * (byte_as_float(word, AT) - (8388608.0 + zero_of(FORMAT)))
    if has_offsets(FORMAT):
        w = w + offset
    return w


@gluon_jit
def four_weights(word, scale, offset, FORMAT: gl.constexpr):
    """Those of all four codes, as 64 bits of bfloat16."""
    low = as_pair(
        weight(word, 0, scale, offset, FORMAT), weight(word, 1, scale, offset, FORMAT)
    )
    high = as_pair(
        weight(word, 2, scale, offset, FORMAT), weight(word, 3, scale, offset, FORMAT)
    )
    return (low.to(gl.int64) & 0xFFFFFFFF) | (high.to(gl.int64) << 32)


@gluon_jit
def decode_tiles_kernel(
    ids_ptr,
    tiles_ptr,
    w_ptr,
    TILES: gl.constexpr,
    K: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    TILE_PAIRS: gl.constexpr,
    FORMAT: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Each warp one step of 256 columns of 16 rows; with ids one of them is written."""
    LANES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0]
    )
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    pairs = tiles_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    tile = gl.program_id(0).to(gl.int64)
    out = tile * 16  # the row of the result that is the tile's first
    asked = 0
    known = True
    if ids_ptr is not None:
        row = gl.load(ids_ptr + tile)
        known = (row >= 0) & (row < 16 * TILES)
        row = gl.where(known, row, 0)
        asked = row % 16
        out = tile - asked
        tile = row.to(gl.int64) // 16
    step = gl.program_id(1) * WARPS + warp
    words = read_step(pairs + tile * TILE_PAIRS, g, c, step, NUM_BLOCKS, FORMAT)
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    for f in gl.static_range(16):
        scales = scales_of(words, f // GROUP, FORMAT)
        codes = codes_of(words, c, 0 * c, f, FORMAT)
        four = step * 64 + 4 * f + c  # of a row's words of four columns
        for i in gl.static_range(2):
            offset = scales[len(scales) - 2 + i]
            mask = (four < K // 4) & (g < 8)
            if ids_ptr is not None:
                mask = mask & (2 * g + i == asked)
            at = w_ptr + ((out + 2 * g + i) * K + 4 * four)
            if w_ptr.dtype.element_ty == gl.bfloat16:
                w = four_weights(codes[i], scales[i], offset, FORMAT)
                if ids_ptr is not None:
                    w = gl.where(known, w, 0)
                gl.store(at.to(gl.pointer_type(gl.int64), bitcast=True), w, mask)
            else:
                for j in gl.static_range(4):
                    w = weight(codes[i], j, scales[i], offset, FORMAT)
                    w = gl.where(known, w, 0.0)
                    gl.store(at + j, w.to(w_ptr.dtype.element_ty), mask)
