"""Writes vectors to a cache, as they are or as codes with scales.

Vectors are quantised as their codec in vector_codec.py says: groups of dims share a
scale, the bits of the codes lie in planes of 8, 4, 2 and 1. A vector stays in registers
on its way: its codes and scales are written once, and the tables of a codec read.

VECTOR is what `vector_of` says.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.gpu.device import compute_capability, next_power_of_2
from jaxkern.gpu.triton_call import constexpr_function, jit, tl
from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook
from jaxkern.primitives.turboquant.vector_codec import (
    Float8Codec,
    TurboQuantCodec,
    VectorCodec,
    code_bytes,
    group_size,
    planes,
)
from jaxkern.triton.norm.rms_norm_quantized import FP8_CONVERSION, round_to_e4m3fn

MOST_CELLS = 2048  # 16 KB with what lies below


def unsupported_codec(codec: VectorCodec, d: int) -> str | None:
    size = group_size(codec, d)
    if size != d and size & (size - 1):
        return f"groups of {size} dims, not a power of 2"
    return None


def planes_of(codec: VectorCodec, d: int) -> tuple[tuple[int, int, int, int], ...]:
    """(bits, how many dims have them, bits before, where it begins) of each plane."""
    found, below, start = [], 0, 0
    for width, count in planes(codec, d):
        found.append((width, count, below, start))
        below += width
        start += width * count // 8
    return tuple(found)


def vector_of(d: int, codec: VectorCodec | None) -> tuple:
    """The constant VECTOR of a cache.

    (d, the power of 2 that holds it) and, of codes, (planes, bytes of a vector, dims of
    a group, largest number or 0 for levels, bits of a dim's number, conversion in
    hardware, d ** -0.5, the first three of `cells_of`).
    """
    dims = next_power_of_2(d)
    if codec is None:
        return d, dims
    size = group_size(codec, d)
    group = dims if size == d else size
    top, cells = 0.0, None
    if isinstance(codec, TurboQuantCodec):
        cells = cells_of(midpoints_of(codec))[:3]
    else:
        top = codec_top(codec)
    hardware = compute_capability() >= FP8_CONVERSION
    stages = dims.bit_length() - 1
    parts = planes_of(codec, d), code_bytes(codec, d)
    return d, dims, *parts, group, top, stages, hardware, d**-0.5, cells


def codec_top(codec) -> float:
    return 448.0 if isinstance(codec, Float8Codec) else float(codec.top)


def constants_of(d: int, codec: VectorCodec | None) -> Sequence[jax.Array | None]:
    """Signs and midpoints of a codec that has them."""
    if not isinstance(codec, TurboQuantCodec):
        return None, None
    midpoints = midpoints_of(codec)
    return jnp.asarray(codec.signs(d)), jnp.asarray(cells_of(midpoints)[3])


def midpoints_of(codec: TurboQuantCodec) -> tuple[float, ...]:
    """Between levels; of 3 bits, then of 2, for a codec that has both."""
    tables = [codec.codebook or lloyd_max_codebook(int(codec.bits))]
    if codec.bits == 2.25:
        tables = [lloyd_max_codebook(bits) for bits in (3, 2)]
    levels = map(np.asarray, tables)
    return tuple(np.concatenate([(x[1:] + x[:-1]) / 2 for x in levels]).tolist())


@functools.cache
def cells_of(midpoints: tuple[float, ...]) -> tuple[float, float, int, np.ndarray]:
    """(a, b, n, table) for cells int(a z + b) of a number z, at most one midpoint each.

    The table has the midpoint of each of n cells, or inf, then how many lie below. With
    a power of two for a the sum is the only rounding, so a cell is the same wherever it
    is computed, and never lower for a larger z. Where levels lie too close for that,
    are not ascending, or few, which bisection finds as fast, n is 0 and the table has
    the midpoints.
    """
    x = np.array(midpoints, np.float32)
    for bits in range(10 if x.size > 3 else 0):
        per = np.float32(2.0**bits)
        first = 1 - np.floor(x[0] * per)
        cell = (x * per + first).astype(np.int32)
        count = int(cell[-1]) + 2
        if count <= MOST_CELLS and (np.diff(cell) > 0).all():
            table = np.full(2 * count, np.inf, np.float32)
            table[cell] = x
            table[count:] = np.searchsorted(cell, np.arange(count))
            return float(per), float(first), count, table
    return 0.0, 0.0, 0, x


@jit
def hadamard(y, ROWS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr):
    """H_D y along the dims, a butterfly for each bit of their number."""
    for k in tl.static_range(STAGES):
        pairs = tl.reshape(y, [ROWS, D >> (k + 1), 2, 1 << k])
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
        y = tl.reshape(pairs, [ROWS, D])
    return y


@constexpr_function
def num_planes(VECTOR):
    return len(VECTOR[2])


@constexpr_function
def of_plane(VECTOR, NUMBER, WHAT):
    """One of the numbers of one of the planes."""
    return VECTOR[2][NUMBER][WHAT]


@constexpr_function
def most_bits(VECTOR):
    """Of the codes that have the most, and how many dims have them."""
    return sum(plane[0] for plane in VECTOR[2]), VECTOR[2][-1][1]


@jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def scales_of(groups, midpoints_ptr, TOP: tl.constexpr):
    """Of groups [groups, dims]."""
    if midpoints_ptr is not None:
        return tl.sqrt_rn(tl.sum(groups * groups, 1) / groups.shape[1])
    else:
        return tl.reduce(tl.abs(groups), 1, larger) * (1.0 / TOP)


@jit
def over_scale(groups, inverse, TOP: tl.constexpr):
    """Groups [groups, dims] times 1 / scale, rounded as the reference rounds it."""
    if TOP == 448.0:
        return groups * inverse[:, None]
    else:  # a sum of its own: none that follows can take in the product unrounded
        return tl.fma(groups, inverse[:, None], 0.0)


@constexpr_function
def of_cells(VECTOR, NUMBER):
    return VECTOR[9][NUMBER]


@jit
def level_of_cell(z, cells_ptr, VECTOR: tl.constexpr):
    """The number of the level nearest to z, see `cells_of`."""
    COUNT: tl.constexpr = of_cells(VECTOR, 2)
    cell = tl.maximum(z * of_cells(VECTOR, 0) + of_cells(VECTOR, 1), 0.0)
    cell = tl.minimum(cell, COUNT - 1.0).to(tl.int32)
    below = tl.load(cells_ptr + COUNT + cell)
    return (below + tl.where(z > tl.load(cells_ptr + cell), 1.0, 0.0)).to(tl.int32)


@jit
def nearest_level(z, midpoints_ptr, BITS: tl.constexpr):
    """The number of the level nearest to z, by bisection over the midpoints."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    code = tl.where(z > tl.load(midpoints_ptr + HALF - 1), HALF, 0)
    for k in tl.static_range(1, BITS):
        above = z > tl.load(midpoints_ptr + code + ((HALF >> k) - 1))
        code += tl.where(above, HALF >> k, 0)
    return code


@jit
def codes_of(z, dim, midpoints_ptr, VECTOR: tl.constexpr):
    """Codes of what a scale leaves, at dims of the same shape."""
    BITS: tl.constexpr = most_bits(VECTOR)[0]
    DIMS: tl.constexpr = most_bits(VECTOR)[1]
    TOP: tl.constexpr = VECTOR[5]
    if midpoints_ptr is not None:
        if of_cells(VECTOR, 2) > 0:
            code = level_of_cell(z, midpoints_ptr, VECTOR)
        else:
            code = nearest_level(z, midpoints_ptr, BITS)
        if DIMS < VECTOR[0]:  # a bit less for the dims behind
            less = nearest_level(z, midpoints_ptr + ((1 << BITS) - 1), BITS - 1)
            code = tl.where(dim < DIMS, code, less)
        return code
    elif TOP == 448.0:
        return round_to_e4m3fn(z, VECTOR[7]).to(tl.int32)
    else:
        # 1.5 * 2**23 leaves the nearest integer in the low bits, halves to even
        q = tl.minimum(tl.maximum(z + 12582912.0, 12582912.0 - TOP), 12582912.0 + TOP)
        return q.to(tl.int32, bitcast=True) - (0x4B400000 - 2 ** (BITS - 1))


@jit
def plane_bytes(code, VECTOR: tl.constexpr, NUMBER: tl.constexpr):
    """Bytes of a plane of neighbouring codes, in one dim; see vector_codec.py."""
    WIDTH: tl.constexpr = of_plane(VECTOR, NUMBER, 0)
    BELOW: tl.constexpr = of_plane(VECTOR, NUMBER, 2)
    SIZE: tl.constexpr = code.numel * WIDTH // 8
    part = (code >> BELOW) & ((1 << WIDTH) - 1)
    if WIDTH <= 1:
        low, high = tl.split(tl.reshape(part, [SIZE * 4, 2]))
        part = low | (high << 1)
    if WIDTH <= 2:
        low, high = tl.split(tl.reshape(part, [SIZE * 2, 2]))
        part = low | (high << 2)
    if WIDTH <= 4:
        low, high = tl.split(tl.reshape(part, [SIZE, 2]))
        part = low | (high << 4)
    return part.to(tl.uint8)


@jit
def write_plane(
    code,
    row_ptr,
    written,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """One of the planes of codes [rows, dims] to where [rows, 1] are to be."""
    WIDTH: tl.constexpr = of_plane(VECTOR, NUMBER, 0)
    COUNT: tl.constexpr = of_plane(VECTOR, NUMBER, 1)
    SIZE: tl.constexpr = VECTOR[1] * WIDTH // 8
    part = tl.reshape(plane_bytes(code, VECTOR, NUMBER), [ROWS, SIZE])
    byte = tl.arange(0, SIZE)[None, :]
    at = of_plane(VECTOR, NUMBER, 3) + byte
    tl.store(row_ptr + at, part, written & (byte < WIDTH * COUNT // 8))


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
        BYTES: tl.constexpr = VECTOR[3]
        GROUP: tl.constexpr = VECTOR[4]
        STAGES: tl.constexpr = VECTOR[6]
        dim = tl.arange(0, DIMS)[None, :]
        if signs_ptr is not None:
            ROOT: tl.constexpr = VECTOR[8]
            signs = tl.load(signs_ptr + dim).to(tl.float32)
            y = hadamard(y * signs, ROWS, DIMS, STAGES) * ROOT
        groups = tl.reshape(y, [ROWS * DIMS // GROUP, GROUP])
        scale = scales_of(groups, midpoints_ptr, VECTOR[5])
        inverse = tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))
        z = over_scale(groups, inverse, VECTOR[5])
        code = codes_of(tl.reshape(z, [ROWS, DIMS]), dim, midpoints_ptr, VECTOR)
        for i in tl.static_range(num_planes(VECTOR)):
            write_plane(code, cache_ptr + row * BYTES, written, ROWS, VECTOR, i)
        group = tl.arange(0, DIMS // GROUP)[None, :]
        groups_of_row: tl.constexpr = (H + GROUP - 1) // GROUP
        at = row * groups_of_row + group
        scale = tl.reshape(scale, [ROWS, DIMS // GROUP])
        tl.store(scales_ptr + at, scale, written & (group < groups_of_row))
