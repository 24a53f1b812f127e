"""Rows of blocks from the weights of other containers, as `interleave` takes them.

    block = the numbers of a group, then its codes, two halves of 32 columns in 16 bytes

No number is rounded. What has no block format here is None.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt8

from jaxkern.primitives.quant.affine_tensor import AffineTensor
from jaxkern.primitives.quant.block_fields import to_bytes
from jaxkern.primitives.quant.fp4 import pack_pairs, unpack_pairs
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.int_tensor import IntTensor
from jaxkern.primitives.quant.microscaled_tensor import MicroscaledTensor
from jaxkern.primitives.quant.tile_formats import TILE_FORMATS, named

Blocks = tuple[UInt8[Array, "... f row_bytes"], str]
DTYPES = {"bfloat16": "BF16", "float16": "F16"}


def blocks_of(w: Any) -> Blocks | None:
    """Rows of blocks and their format."""
    qtype = tile_format(w)
    return None if qtype is None else (BLOCKS[type(w)](w), qtype)


def tile_format(w: Any) -> str | None:
    """The format of the blocks of a container; w may hold shapes alone."""
    read = FORMAT_OF.get(type(w))
    qtype = None if read is None else read(w)
    if qtype not in TILE_FORMATS or w.shape[-1] % TILE_FORMATS[qtype].elements:
        return None
    return qtype


def _microscaled_format(w: MicroscaledTensor) -> str | None:
    return {"mxfp4": "MXFP4", "nvfp4": "NVFP4_256"}.get(w.format)


def _int_format(w: IntTensor) -> str | None:
    if w.bits != 4 or w.order is not None:
        return None
    return named("INT4", w.group_size, DTYPES.get(w.scales.dtype.name, ""))


def _affine_format(w: AffineTensor) -> str | None:
    if w.bits != 4 or w.biases.dtype != w.scales.dtype:
        return None
    return named("AFFINE4", w.group_size, DTYPES.get(w.scales.dtype.name, ""))


def _of_microscaled(w: MicroscaledTensor) -> UInt8[Array, "... row_bytes"]:
    if w.format == "mxfp4":
        return _side_by_side(w.scales[..., None], in_halves(w.codes, 32))
    lead, blocks = w.scales.shape[:-1], w.scales.shape[-1] // 16
    factor = jnp.ones((), jnp.float32) if w.global_scale is None else w.global_scale
    factor = jnp.broadcast_to(jnp.asarray(factor)[..., None, None], (*lead, blocks))
    d = to_bytes(factor.astype(jnp.float32)[..., None])
    scales = w.scales.reshape(*lead, blocks, 16)
    return _side_by_side(d, scales, in_halves(w.codes, 256))


def _of_int(w: IntTensor) -> UInt8[Array, "... row_bytes"]:
    zeros = jnp.full_like(w.scales, 8) if w.zeros is None else w.zeros
    codes = w.codes
    if w.signed:  # 8 more than they are
        codes = codes ^ jnp.uint8(0x88)
        zeros = jnp.full_like(w.scales, 8) if w.zeros is None else zeros + 8
    return _side_by_side(
        _bytes_of(w.scales), _bytes_of(zeros), in_halves(codes, w.group_size)
    )


def _of_affine(w: AffineTensor) -> UInt8[Array, "... row_bytes"]:
    codes = w.codes
    if codes.dtype == jnp.uint8:
        pairs = pack_pairs(codes)
    else:
        *lead, words = codes.shape
        pairs = to_bytes(codes).reshape(*lead, 4 * words)
    return _side_by_side(
        _bytes_of(w.scales), _bytes_of(w.biases), in_halves(pairs, w.group_size)
    )


def _bytes_of(numbers: Shaped[Array, "... n"]) -> UInt8[Array, "... n bytes"]:
    return to_bytes(numbers[..., None])


def in_halves(
    pairs: UInt8[Array, "... d/2"], elements: int
) -> UInt8[Array, "... blocks bytes"]:
    """Pairs of neighbours as pairs 16 columns apart, block by block."""
    *lead, half = pairs.shape
    codes = unpack_pairs(pairs).reshape(*lead, half // 16, 2, 16)
    both = codes[..., 0, :] | codes[..., 1, :] << 4
    return both.reshape(*lead, 2 * half // elements, elements // 2)


def _side_by_side(*fields: UInt8[Array, "... blocks n"]) -> UInt8[Array, "... bytes"]:
    blocks = jnp.concatenate(fields, axis=-1)
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])


FORMAT_OF: dict[type, Callable[[Any], str | None]] = {
    GGUFTensor: lambda w: w.qtype,
    MicroscaledTensor: _microscaled_format,
    IntTensor: _int_format,
    AffineTensor: _affine_format,
}
BLOCKS: dict[type, Callable[[Any], jax.Array]] = {
    GGUFTensor: lambda w: w.blocks,
    MicroscaledTensor: _of_microscaled,
    IntTensor: _of_int,
    AffineTensor: _of_affine,
}
