"""Writes vectors to a cache, as they are or as codes with scales.

Vectors are quantised as their codec in vector_codec.py says: groups of dims share a
scale, the bits of the codes lie in planes of 8, 4, 2 and 1. A vector stays in registers
on its way: its codes and scales are written once, and the tables of a codec read.

VECTOR is what `vector_of` says.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook
from jaxkern.primitives.turboquant.vector_codec import (
    Float8Codec,
    TurboQuantCodec,
    VectorCodec,
    group_size,
)
from jaxkern.triton.block_sizes import next_power_of_2
from jaxkern.triton.norm.rms_norm_quantized import FP8_CONVERSION, round_to_e4m3fn
from jaxkern.triton.triton_call import compute_capability, jit, tl


def unsupported_codec(codec: VectorCodec, d: int) -> str | None:
    size = group_size(codec, d)
    if codec.bits == 2.25:
        return "codes of two sizes"
    if size != d and size & (size - 1):
        return f"groups of {size} dims, not a power of 2"
    return None


def vector_of(d: int, codec: VectorCodec | None) -> tuple:
    """The constant VECTOR of a cache.

    (d, the power of 2 that holds it) and, of codes, (bits, dims of a group, largest
    number or 0 for levels, bits of a dim's number, conversion in hardware, d ** -0.5).
    """
    dims = next_power_of_2(d)
    if codec is None:
        return d, dims
    size = group_size(codec, d)
    group = dims if size == d else size
    top = 0.0 if isinstance(codec, TurboQuantCodec) else codec_top(codec)
    hardware = compute_capability() >= FP8_CONVERSION
    stages = dims.bit_length() - 1
    return d, dims, int(codec.bits), group, top, stages, hardware, d**-0.5


def codec_top(codec) -> float:
    return 448.0 if isinstance(codec, Float8Codec) else float(codec.top)


def constants_of(d: int, codec: VectorCodec | None) -> Sequence[jax.Array | None]:
    """Signs and midpoints of a codec that has them."""
    if not isinstance(codec, TurboQuantCodec):
        return None, None
    levels = np.asarray(codec.codebook or lloyd_max_codebook(int(codec.bits)))
    midpoints = jnp.asarray((levels[1:] + levels[:-1]) / 2, jnp.float32)
    return jnp.asarray(codec.signs(d)), midpoints


@jit
def hadamard(y, ROWS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr):
    """H_D y along the dims, a butterfly for each bit of their number."""
    for k in tl.static_range(STAGES):
        pairs = tl.reshape(y, [ROWS, D >> (k + 1), 2, 1 << k])
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
        y = tl.reshape(pairs, [ROWS, D])
    return y


@jit
def nearest_level(z, midpoints_ptr, BITS: tl.constexpr):
    """The number of the level nearest to z, by bisection over the midpoints."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    code = tl.zeros(z.shape, tl.int32)
    for k in tl.static_range(BITS):
        above = z > tl.load(midpoints_ptr + code + ((HALF >> k) - 1))
        code += tl.where(above, HALF >> k, 0)
    return code


@jit
def write_plane(
    code,
    codes_ptr,
    row,
    written,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The bits of the codes that lie in the plane of WIDTH; see vector_codec.py."""
    H: tl.constexpr = VECTOR[0]
    DIMS: tl.constexpr = VECTOR[1]
    BITS: tl.constexpr = VECTOR[2]
    BELOW: tl.constexpr = BITS & (16 - 2 * WIDTH)  # bits in the planes before
    part = (code >> BELOW) & ((1 << WIDTH) - 1)
    if WIDTH <= 1:
        low, high = tl.split(tl.reshape(part, [ROWS, DIMS // 2, 2]))
        part = low | (high << 1)
    if WIDTH <= 2:
        low, high = tl.split(tl.reshape(part, [ROWS, DIMS * WIDTH // 4, 2]))
        part = low | (high << 2)
    if WIDTH <= 4:
        low, high = tl.split(tl.reshape(part, [ROWS, DIMS * WIDTH // 8, 2]))
        part = low | (high << 4)
    byte = tl.arange(0, DIMS * WIDTH // 8)[None, :]
    at = row * (H * BITS // 8) + H * BELOW // 8 + byte
    tl.store(codes_ptr + at, part.to(tl.uint8), written & (byte < H * WIDTH // 8))


@jit
def write_vectors(
    y,
    cache_ptr,
    scales_ptr,
    signs_ptr,
    midpoints_ptr,
    row,
    written,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Vectors [rows, dims] to rows [rows, 1] of the cache; codes if it has scales."""
    H: tl.constexpr = VECTOR[0]
    DIMS: tl.constexpr = VECTOR[1]
    if scales_ptr is None:
        dim = tl.arange(0, DIMS)[None, :]
        tl.store(cache_ptr + row * H + dim, y, written & (dim < H))
    else:
        BITS: tl.constexpr = VECTOR[2]
        GROUP: tl.constexpr = VECTOR[3]
        TOP: tl.constexpr = VECTOR[4]  # of the codes that are numbers
        STAGES: tl.constexpr = VECTOR[5]
        HARDWARE: tl.constexpr = VECTOR[6]
        if signs_ptr is not None:
            signs = tl.load(signs_ptr + tl.arange(0, DIMS)[None, :]).to(tl.float32)
            ROOT: tl.constexpr = VECTOR[7]
            y = hadamard(y * signs, ROWS, DIMS, STAGES) * ROOT
        groups = tl.reshape(y, [ROWS, DIMS // GROUP, GROUP])
        if midpoints_ptr is not None:
            scale = tl.sqrt_rn(tl.sum(groups * groups, 2, keep_dims=True) / GROUP)
        else:
            largest = tl.max(tl.abs(groups), 2, keep_dims=True)
            bad = tl.max((groups != groups).to(tl.int32), 2, keep_dims=True)
            scale = tl.where(bad > 0, float("nan"), largest / TOP)
        z = tl.div_rn(groups, tl.where(scale == 0.0, 1.0, scale))
        z = tl.reshape(z, [ROWS, DIMS])
        if midpoints_ptr is not None:
            code = nearest_level(z, midpoints_ptr, BITS)
        elif TOP == 448.0:
            code = round_to_e4m3fn(z, HARDWARE).to(tl.int32)
        else:
            q = (z + 12582912.0) - 12582912.0  # 1.5 * 2**23: to the nearest, to even
            q = tl.minimum(tl.maximum(q, -TOP), TOP)
            code = (q + 2 ** (BITS - 1)).to(tl.int32)
        if BITS & 8:
            write_plane(code, cache_ptr, row, written, 8, ROWS, VECTOR)
        if BITS & 4:
            write_plane(code, cache_ptr, row, written, 4, ROWS, VECTOR)
        if BITS & 2:
            write_plane(code, cache_ptr, row, written, 2, ROWS, VECTOR)
        if BITS & 1:
            write_plane(code, cache_ptr, row, written, 1, ROWS, VECTOR)
        group = tl.arange(0, DIMS // GROUP)[None, :]
        groups_of_row: tl.constexpr = (H + GROUP - 1) // GROUP
        at = row * groups_of_row + group
        scale = tl.reshape(scale, [ROWS, DIMS // GROUP])
        tl.store(scales_ptr + at, scale, written & (group < groups_of_row))
