"""Unpacks, scales and rotates vectors back in one launch.

A thread reads the bytes of eight neighbouring dims of each plane, which become the
layout that the transform of fwht.py stores from. Codes and scales are read once, the
vectors written once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.gpu.triton_call import gl, gluon_jit, jit, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.kernel_primitive import at_least_f32
from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook
from jaxkern.primitives.turboquant.vector_codec import (
    IntCodec,
    TurboQuantCodec,
    VectorCodec,
    num_dims,
)
from jaxkern.triton.turboquant.cache_codes import (
    most_bits,
    num_planes,
    of_plane,
    vector_of,
)
from jaxkern.triton.turboquant.fwht import LONGEST, in_three_phases, layouts
from jaxkern.triton.turboquant.quantize_vectors import places_in_plane, tile_sizes

ITEM = 2  # eight neighbouring dims in a thread


def unsupported(
    codec: VectorCodec, codes: Any = None, scales: Any = None, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    d = num_dims("dequantize_vectors", codec, codes.shape[-1])
    if d & (d - 1) or d > LONGEST:
        return f"vectors of {d} dims are no power of 2 up to {LONGEST}"
    if scales.dtype.itemsize == 1:
        return "`scales` are float8"
    return unsupported_anywhere(scales=scales)


def levels_of(codec: VectorCodec) -> np.ndarray | None:
    """The level of every code; of integers none, they are computed."""
    if isinstance(codec, IntCodec):
        return None
    if codec.bits == 2.25:
        return np.concatenate([lloyd_max_codebook(bits) for bits in (3, 2)])
    return codec.table()


@jit
def codes_of_plane(part, WIDTH: tl.constexpr):
    """The inverse of plane_bytes: WIDTH bits each of neighbouring codes."""
    if WIDTH <= 4:
        part = tl.reshape(tl.join(part & 15, part >> 4), [part.numel * 2])
    if WIDTH <= 2:
        part = tl.reshape(tl.join(part & 3, part >> 2), [part.numel * 2])
    if WIDTH <= 1:
        part = tl.reshape(tl.join(part & 1, part >> 1), [part.numel * 2])
    return part


@gluon_jit
def load_plane(
    codes_ptr, left, VECTOR: gl.constexpr, NUMBER: gl.constexpr, TILE: gl.constexpr
):
    """The bits of codes that lie in one of the planes of whole vectors."""
    WIDTH: gl.constexpr = of_plane(VECTOR, NUMBER, 0)
    BYTES: gl.constexpr = gl.BlockedLayout([WIDTH], [32], [gl.num_warps()], [0])
    at = gl.arange(0, TILE * WIDTH // 8, BYTES)
    at, inside = places_in_plane(at, left, VECTOR, NUMBER)
    part = gl.load(codes_ptr + at, inside, 0, eviction_policy="evict_first")
    return codes_of_plane(part.to(gl.int32), WIDTH) << of_plane(VECTOR, NUMBER, 2)


@gluon_jit
def dequantize_vectors_kernel(
    codes_ptr,
    scales_ptr,
    levels_ptr,
    signs_ptr,
    y_ptr,
    SIZE: gl.constexpr,
    VECTOR: gl.constexpr,
    TILE: gl.constexpr,
    ITEM: gl.constexpr,
):
    """A tile of whole vectors, rotated back if there are signs."""
    D: gl.constexpr = VECTOR[0]
    TURN: gl.constexpr = 1 if signs_ptr is None else D
    LOADS: gl.constexpr = layouts(TURN, TILE, ITEM, gl.num_warps())[0]
    tile = gl.program_id(0).to(gl.int64)
    codes_ptr += tile * (TILE // D * VECTOR[3])
    left = SIZE // D - tile * (TILE // D)
    code = load_plane(codes_ptr, left, VECTOR, 0, TILE)
    FLAT: gl.constexpr = code.type.layout
    for i in gl.static_range(1, num_planes(VECTOR)):
        part = load_plane(codes_ptr, left, VECTOR, i, TILE)
        code = code | gl.convert_layout(part, FLAT)
    code = gl.convert_layout(code, LOADS)
    BITS: gl.constexpr = most_bits(VECTOR)[0]
    DIMS: gl.constexpr = most_bits(VECTOR)[1]
    at = gl.arange(0, TILE, LOADS)
    start = tile * TILE
    if levels_ptr is None:
        level = (code - 2 ** (BITS - 1)).to(gl.float32)
    else:
        if DIMS < D:  # a bit less for the dims behind
            code = gl.where(at % D < DIMS, code, code + 2**BITS)
        level = gl.load(levels_ptr + code, eviction_policy="evict_last")
    group = (start + at) // VECTOR[4]
    scale = gl.load(scales_ptr + group, start + at < SIZE, 0.0)
    y = level * scale.to(gl.float32)
    y = in_three_phases(y, TURN, TILE, ITEM)
    at = gl.arange(0, TILE, y.type.layout)
    if signs_ptr is not None:
        signs = gl.load(signs_ptr + at % D, eviction_policy="evict_last")
        y = y * VECTOR[8] * signs.to(gl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    gl.store(y_ptr + start + at, y, start + at < SIZE, eviction_policy="evict_first")


def dequantize_vectors_fwd(codes, scales, *, codec, unrotate, dtype):
    *lead, row = codes.shape
    d = num_dims("dequantize_vectors", codec, row)
    levels = levels_of(codec)
    turns = unrotate and isinstance(codec, TurboQuantCodec)
    sizes = tile_sizes(d)
    y = jax.ShapeDtypeStruct((*lead, d), dtype or at_least_f32(scales).dtype)
    constants = {"SIZE": y.size, "VECTOR": vector_of(d, codec), "ITEM": ITEM}
    [y] = sparse_call(
        dequantize_vectors_kernel,
        (-(-y.size // sizes["TILE"]),),
        {
            "codes_ptr": codes,
            "scales_ptr": scales,
            "levels_ptr": None if levels is None else jnp.asarray(levels, jnp.float32),
            "signs_ptr": jnp.asarray(codec.signs(d)) if turns else None,
        },
        {"y_ptr": y},
        constants | sizes,
    )
    return y
