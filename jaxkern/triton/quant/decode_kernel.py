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
    """Those of all four codes, as two words of bfloat16."""
    low = as_pair(
        weight(word, 0, scale, offset, FORMAT), weight(word, 1, scale, offset, FORMAT)
    )
    high = as_pair(
        weight(word, 2, scale, offset, FORMAT), weight(word, 3, scale, offset, FORMAT)
    )
    return low, high


@gluon_jit
def of_neighbour(word):
    """What the lane beside it has: c is 0 and 1, or 2 and 3."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;",
        "=r,r",
        [word],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def store_four_words(at, words, mask):
    """16 bytes of each lane, at addresses of global memory."""
    gl.inline_asm_elementwise(
        """{ .reg .pred stores; setp.ne.b32 stores, $6, 0;
        @stores st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }""",
        "=r,l,r,r,r,r,r",
        [at.to(gl.int64), words[0], words[1], words[2], words[3], mask.to(gl.int32)],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def write_step(words, rows, g, c, step, K: gl.constexpr, FORMAT: gl.constexpr):
    """A step of the 16 rows of bfloat16 from `rows` on.

    Of two fragments a lane has four columns each. Lanes side by side exchange theirs,
    so that each has eight of one: four lanes then fill 64 bytes of a row.
    """
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    odd = c % 2 == 1
    for f in gl.static_range(0, 16, 2):
        scales = scales_of(words, f // GROUP, FORMAT)
        others = scales_of(words, (f + 1) // GROUP, FORMAT)
        codes = codes_of(words, c, 0 * c, f, FORMAT)
        more = codes_of(words, c, 0 * c, f + 1, FORMAT)
        column = step * 256 + 16 * f + 4 * c + c % 2 * 12
        there = (column < K) & (g < 8)
        for i in gl.static_range(2):
            offset, other = scales[len(scales) - 2 + i], others[len(others) - 2 + i]
            a = four_weights(codes[i], scales[i], offset, FORMAT)
            b = four_weights(more[i], others[i], other, FORMAT)
            low = of_neighbour(gl.where(odd, a[0], b[0]))
            high = of_neighbour(gl.where(odd, a[1], b[1]))
            first, second = gl.where(odd, low, a[0]), gl.where(odd, high, a[1])
            third, fourth = gl.where(odd, b[0], low), gl.where(odd, b[1], high)
            at = rows + ((2 * g + i) * K + column)
            store_four_words(at, (first, second, third, fourth), there)


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
    """Each warp one step of 256 columns of 16 rows; with ids one of them is written.

    Programs that begin together have the steps of the same rows.
    """
    CHUNKS: gl.constexpr = (K + 256 * WARPS - 1) // (256 * WARPS)
    LANES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0]
    )
    LANES2: gl.constexpr = gl.SliceLayout(2, LANES)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LANES2))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, LANES2))[None, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    pairs = tiles_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    tile = (gl.program_id(0) // CHUNKS).to(gl.int64)
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
    step = gl.program_id(0) % CHUNKS * WARPS + warp
    words = read_step(pairs + tile * TILE_PAIRS, g, c, step, NUM_BLOCKS, FORMAT)
    if w_ptr.dtype.element_ty == gl.bfloat16 and ids_ptr is None:
        write_step(words, w_ptr + out * K, g, c, step, K, FORMAT)
    else:
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
                    low, high = four_weights(codes[i], scales[i], offset, FORMAT)
                    w = (low.to(gl.int64) & 0xFFFFFFFF) | (high.to(gl.int64) << 32)
                    w = gl.where(known, w, 0)
                    gl.store(at.to(gl.pointer_type(gl.int64), bitcast=True), w, mask)
                else:
                    for j in gl.static_range(4):
                        w = weight(codes[i], j, scales[i], offset, FORMAT)
                        w = gl.where(known, w, 0.0)
                        gl.store(at + j, w.to(w_ptr.dtype.element_ty), mask)
