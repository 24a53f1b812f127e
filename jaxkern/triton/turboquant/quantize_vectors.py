"""Rotates, scales, quantises and packs vectors in one launch.

The transform of fwht.py leaves neighbouring dims in one thread, as packed codes want
them. Each vector is read once; its codes and scales are written once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.kv_cache.update_kv_cache import update_kv_cache_reference
from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook
from jaxkern.primitives.turboquant.vector_codec import (
    Float8Codec,
    TurboQuantCodec,
    VectorCodec,
    code_bytes,
    group_size,
)
from jaxkern.triton.block_sizes import tuned
from jaxkern.triton.triton_call import gl, gluon_jit, sparse_call
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere
from jaxkern.triton.turboquant.fwht import transformed

LONGEST = 4096
WIDTHS = (2, 4, 8)  # bits of a code; others are not whole planes of a byte


def unsupported(codec: VectorCodec, x: Any = None, **rest: Any) -> str | None:
    """A reason in words, or None."""
    d = x.shape[-1]
    size = group_size(codec, d)
    if isinstance(codec, Float8Codec):
        return "codes that are floats"
    if codec.bits not in WIDTHS:
        return f"codes of {codec.bits} bits lie in more than one plane of 2, 4, 8 bits"
    if d & (d - 1) or size & (size - 1) or not 8 <= d <= LONGEST:
        return f"{d} dims in groups of {size} are no powers of two from 8 to {LONGEST}"
    return "`x` is float8" if x.dtype.itemsize == 1 else unsupported_anywhere(x=x)


def unsupported_in_cache(
    codec: VectorCodec, new: Any = None, dscales: Any = None, **rest: Any
) -> str | None:
    if dscales is not None:
        return "the gradient has no kernel"
    return unsupported(codec, x=new)


def tile_sizes(d: int, dtype) -> dict:
    """32 elements a thread: scales and codes need registers too."""
    return tuned("quantize_vectors", d, dtype, {"TILE": LONGEST, "num_warps": 4})


@gluon_jit
def nearest_level(z, midpoints_ptr, BITS: gl.constexpr):
    """The number of the level nearest to z, by bisection over the midpoints."""
    half: gl.constexpr = 1 << (BITS - 1)
    code = gl.where(z > gl.load(midpoints_ptr + half - 1), half, 0)
    for i in gl.static_range(1, BITS):
        above = z > gl.load(midpoints_ptr + code + ((half >> i) - 1))
        code += gl.where(above, half >> i, 0)
    return code


@gluon_jit
def packed(code, BITS: gl.constexpr):
    """Whole bytes of neighbouring codes, the first one in the lowest bits."""
    if BITS <= 2:
        low, high = gl.split(gl.reshape(code, [code.shape[0] // 2, 2]))
        code = low | (high << 2)
    if BITS <= 4:
        low, high = gl.split(gl.reshape(code, [code.shape[0] // 2, 2]))
        code = low | (high << 4)
    return code


@gluon_jit
def quantize_vectors_kernel(
    x_ptr,
    signs_ptr,
    midpoints_ptr,
    codes_ptr,
    scales_ptr,
    SIZE: gl.constexpr,
    D: gl.constexpr,
    ROOT: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    TILE: gl.constexpr,
    ITEM: gl.constexpr,
):
    """Without midpoints the levels are integers; D is 1 where nothing rotates."""
    y = transformed(x_ptr, signs_ptr, SIZE, D, TILE, ITEM)
    flat: gl.constexpr = y.type.layout
    top: gl.constexpr = 2 ** (BITS - 1) - 1
    y = gl.reshape(y * ROOT, [TILE // GROUP, GROUP])
    if midpoints_ptr is not None:
        scale = gl.sqrt(gl.sum(y * y, 1) / GROUP)
    else:
        scale = gl.max(gl.abs(y), 1) / top
    z = y / gl.expand_dims(gl.where(scale == 0.0, 1.0, scale), 1)
    z = gl.convert_layout(gl.reshape(z, [TILE]), flat)
    if midpoints_ptr is not None:
        code = nearest_level(z, midpoints_ptr, BITS)
    else:
        q = (z + 12582912.0) - 12582912.0  # 1.5 * 2**23: to the nearest, halves to even
        q = gl.minimum(gl.maximum(q, -top), top)
        code = (q + 2 ** (BITS - 1)).to(gl.int32)
    code = packed(code, BITS).to(gl.uint8)

    tile = gl.program_id(0).to(gl.int64)
    at = gl.arange(0, TILE * BITS // 8, code.type.layout)
    start = tile * (TILE * BITS // 8)
    gl.store(codes_ptr + start + at, code, at < SIZE * BITS // 8 - start)
    at = gl.arange(0, TILE // GROUP, scale.type.layout)
    start = tile * (TILE // GROUP)
    gl.store(scales_ptr + start + at, scale, at < SIZE // GROUP - start)


def quantize_vectors_fwd(x: jax.Array, *, codec: VectorCodec):
    *lead, d = x.shape
    rotates = isinstance(codec, TurboQuantCodec)
    signs = midpoints = None
    if rotates:
        levels = np.asarray(codec.codebook or lloyd_max_codebook(int(codec.bits)))
        midpoints = jnp.asarray((levels[1:] + levels[:-1]) / 2, jnp.float32)
        signs = jnp.asarray(codec.signs(d))
    sizes = tile_sizes(d, x.dtype)
    group = group_size(codec, d)
    constants = {
        "SIZE": x.size,
        "D": d if rotates else 1,
        "ROOT": d**-0.5 if rotates else 1.0,
        "GROUP": group,
        "BITS": int(codec.bits),
        "ITEM": x.dtype.itemsize,
    }
    given = {"x_ptr": x, "signs_ptr": signs, "midpoints_ptr": midpoints}
    results = {
        "codes_ptr": jax.ShapeDtypeStruct((*lead, code_bytes(codec, d)), jnp.uint8),
        "scales_ptr": jax.ShapeDtypeStruct((*lead, d // group), jnp.float32),
    }
    grid = (-(-x.size // sizes["TILE"]),)
    out: Any = sparse_call(
        quantize_vectors_kernel, grid, given, results, constants | sizes
    )
    return out


def update_quantized_kv_cache_fwd(
    codes, scales, new, positions, new_lengths, *, codec, ring
):
    """One launch for the new vectors; XLA writes them into the cache in place."""
    new_codes, new_scales = quantize_vectors_fwd(new, codec=codec)
    slots = (positions, new_lengths)
    return (
        update_kv_cache_reference(codes, new_codes, *slots, ring=ring),
        update_kv_cache_reference(scales, new_scales, *slots, ring=ring),
    )
