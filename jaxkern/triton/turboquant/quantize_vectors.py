"""Rotates, scales, quantises and packs vectors in one launch.

The transform of fwht.py leaves neighbouring dims in one thread, as packed codes want
them. Each vector is read once; its codes and scales are written once. Dims that are no
power of two have zeros behind them, in registers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.triton_call import gl, gluon_jit, jit, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.turboquant.vector_codec import (
    VectorCodec,
    code_bytes,
    group_size,
)
from jaxkern.triton.turboquant.cache_codes import (
    codes_of,
    constants_of,
    num_planes,
    of_plane,
    over_scale,
    plane_bytes,
    scales_of,
    unsupported_codec,
    vector_of,
)
from jaxkern.triton.turboquant.fwht import LONGEST, layouts, transformed

TILE = 4096  # elements of a program, or one vector


def unsupported(codec: VectorCodec, x: Any = None, **rest: Any) -> str | None:
    """A reason in words, or None."""
    d = x.shape[-1]
    if d > LONGEST:
        return f"vectors of {d} dims, above {LONGEST}, are too long"
    if x.dtype.itemsize == 1:
        return "`x` is float8"
    return unsupported_codec(codec, d) or unsupported_anywhere(x=x)


def tile_sizes(d: int) -> dict:
    """32 elements a thread, or 64: scales and codes need registers too."""
    tile = max(d, TILE)
    return {"TILE": tile, "num_warps": min(tile // 1024, 16)}


@jit
def places_in_plane(at, left, VECTOR: tl.constexpr, NUMBER: tl.constexpr):
    """Where the bytes of a plane of whole vectors lie, and whether they are there."""
    BYTES: tl.constexpr = VECTOR[3]
    WIDTH: tl.constexpr = of_plane(VECTOR, NUMBER, 0)
    COUNT: tl.constexpr = of_plane(VECTOR, NUMBER, 1)
    WIDE: tl.constexpr = VECTOR[1] * WIDTH // 8
    inside = at < left * WIDE
    if WIDE != BYTES:  # beside other planes
        byte = at % WIDE
        inside = inside & (byte < WIDTH * COUNT // 8)
        at = at // WIDE * BYTES + of_plane(VECTOR, NUMBER, 3) + byte
    return at, inside


@gluon_jit
def store_plane(code, codes_ptr, left, VECTOR: gl.constexpr, NUMBER: gl.constexpr):
    """One of the planes of whole vectors, of which `left` are to be written."""
    part = plane_bytes(code, VECTOR, NUMBER)
    at = gl.arange(0, part.shape[0], part.type.layout)
    at, inside = places_in_plane(at, left, VECTOR, NUMBER)
    gl.store(codes_ptr + at, part, inside)


@gluon_jit
def load_padded(
    x_ptr,
    left,
    VECTOR: gl.constexpr,
    TILE: gl.constexpr,
    ITEM: gl.constexpr,
):
    """Whole vectors in float32, zeros behind their dims, in the layout for stores."""
    D: gl.constexpr = VECTOR[0]
    DIMS: gl.constexpr = VECTOR[1]
    at = gl.arange(0, TILE, layouts(1, TILE, ITEM, gl.num_warps())[2])
    row = at // DIMS
    inside = (at % DIMS < D) & (row < left)
    x = gl.load(x_ptr + row * D + at % DIMS, inside, 0.0, eviction_policy="evict_first")
    return x.to(gl.float32)


@gluon_jit
def reciprocal(x):
    """1 / x to the nearest, in half the registers of a division that is."""
    y = 1.0 / x
    rest = gl.fma(-x, y, 1.0)
    # nothing to correct where y overflows, or x is infinite or NaN
    return gl.where(gl.abs(rest) < 1.0, gl.fma(rest, y, y), y)


@gluon_jit
def quantize_vectors_kernel(
    x_ptr,
    signs_ptr,
    midpoints_ptr,
    codes_ptr,
    scales_ptr,
    COUNT: gl.constexpr,
    VECTOR: gl.constexpr,
    TILE: gl.constexpr,
    ITEM: gl.constexpr,
):
    """A tile of whole vectors of all COUNT; VECTOR as in cache_codes.py."""
    D: gl.constexpr = VECTOR[0]
    DIMS: gl.constexpr = VECTOR[1]
    GROUP: gl.constexpr = VECTOR[4]
    VECTORS: gl.constexpr = TILE // DIMS
    first = gl.program_id(0).to(gl.int64) * VECTORS
    left = COUNT - first
    if signs_ptr is not None:
        ROOT: gl.constexpr = VECTOR[8]
        y = transformed(x_ptr, signs_ptr, COUNT * D, D, TILE, ITEM) * ROOT
    elif D == DIMS:
        y = transformed(x_ptr, signs_ptr, COUNT * D, 1, TILE, ITEM)
    else:
        y = load_padded(x_ptr + first * D, left, VECTOR, TILE, ITEM)
    flat: gl.constexpr = y.type.layout
    y = gl.reshape(y, [TILE // GROUP, GROUP])
    scale = scales_of(y, midpoints_ptr, VECTOR[5])
    inverse = reciprocal(gl.where(scale == 0.0, 1.0, scale))
    z = gl.reshape(over_scale(y, inverse, VECTOR[5]), [TILE])
    z = gl.convert_layout(z, flat)
    code = codes_of(z, gl.arange(0, TILE, flat) % DIMS, midpoints_ptr, VECTOR)
    for i in gl.static_range(num_planes(VECTOR)):
        store_plane(code, codes_ptr + first * VECTOR[3], left, VECTOR, i)
    GROUPS: gl.constexpr = (D + GROUP - 1) // GROUP
    ALL_GROUPS: gl.constexpr = DIMS // GROUP
    at = gl.arange(0, TILE // GROUP, scale.type.layout)
    inside = at // ALL_GROUPS < left
    if GROUPS != ALL_GROUPS:
        inside = inside & (at % ALL_GROUPS < GROUPS)
        at = at // ALL_GROUPS * GROUPS + at % ALL_GROUPS
    gl.store(scales_ptr + first * GROUPS + at, scale, inside)


def quantize_vectors_fwd(x: jax.Array, *, codec: VectorCodec):
    *lead, d = x.shape
    vector = vector_of(d, codec)
    signs, midpoints = constants_of(d, codec)
    sizes = tile_sizes(vector[1])
    count, groups = x.size // d, d // group_size(codec, d)
    # a thread has whole bytes of each plane
    item = 2 if int(codec.bits) & 1 or codec.bits == 2.25 else x.dtype.itemsize
    out: Any = sparse_call(
        quantize_vectors_kernel,
        (-(-count // (sizes["TILE"] // vector[1])),),
        {"x_ptr": x, "signs_ptr": signs, "midpoints_ptr": midpoints},
        {
            "codes_ptr": jax.ShapeDtypeStruct((*lead, code_bytes(codec, d)), jnp.uint8),
            "scales_ptr": jax.ShapeDtypeStruct((*lead, groups), jnp.float32),
        },
        {"COUNT": count, "VECTOR": vector, "ITEM": item} | sizes,
    )
    return out
