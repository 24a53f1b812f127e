"""Block formats that `InterleavedTensor` alone has: weights of 4 bits of other systems.

| format | weights of a block | its bytes | holds |
|---|---|---|---|
| NVFP4_256 | 256 | d[4] scales[16] qs[128] | NVFP4; d is the scale of the matrix |
| AFFINE4_g_t | g | scale[2] bias[2] qs[g / 2] | MLX's affine format |
| INT4_g_t | g | scale[2] zero[2] qs[g / 2] | integers with zero points |

    NVFP4_256     w = element * scale * d
    AFFINE4_g_t   w = scale * code + bias
    INT4_g_t      w = (code - zero) * scale

g is 32, 64 or 128; t, the dtype of the two numbers, BF16 or F16. Of each 32 codes byte
i has the one of column i in its lower half and that of column i + 16 in the upper, as
the formats of ggml do: so the kernels for blocks of GGUF read these too.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from jaxkern.primitives.float8 import decode_float8
from jaxkern.primitives.quant.block_fields import (
    Unpacked,
    bit_fields,
    from_bytes,
    look_up,
)
from jaxkern.primitives.quant.block_formats import FORMATS, KERNEL_FORMATS
from jaxkern.primitives.quant.gguf_blocks import E2M1_CODES, decode_rows

GROUPS = (32, 64, 128)
NARROW = {"BF16": jnp.bfloat16, "F16": jnp.float16}


class TileFormat(NamedTuple):
    """`elements` weights in `bytes` bytes.

    Attributes:
      elements, bytes: of a block.
      units: what stays together where 16 rows are interleaved, see `Codes`.
      unpack: of blocks; None for those of GGUF.
    """

    elements: int
    bytes: int
    units: tuple[tuple[int, int], ...]
    unpack: Callable[[UInt8[Array, "... bytes"]], Unpacked] | None = None


def _nvfp4(b):
    d = from_bytes(b[..., :4], jnp.float32)[..., None]
    scale = decode_float8(b[..., 4:20], "e4m3fn") * d
    code = look_up(E2M1_CODES, bit_fields(b[..., 20:], 4, every=16, shape=(16, 16)))
    return Unpacked(code, 0.5 * scale[..., None])


def _narrow(b, name: str) -> Float32[Array, "... 1 1"]:
    return from_bytes(b, NARROW[name]).astype(jnp.float32)[..., None, None]


def _two_numbers(kind: str, group: int, name: str):
    def unpack(b):
        code = bit_fields(b[..., 4:], 4, every=16, shape=(1, group))
        scale, other = _narrow(b[..., :2], name), _narrow(b[..., 2:4], name)
        return Unpacked(code, scale, other if kind == "AFFINE4" else -other * scale)

    return unpack


def named(kind: str, group: int, name: str) -> str:
    """The format of "AFFINE4" or "INT4" in groups, its numbers of a key of `NARROW`."""
    return f"{kind}_{group}_{name}"


OWN_FORMATS = {"NVFP4_256": TileFormat(256, 148, ((4, 37),), _nvfp4)} | {
    named(kind, g, name): TileFormat(
        g, 4 + g // 2, ((4, 1 + g // 8),), _two_numbers(kind, g, name)
    )
    for kind in ("AFFINE4", "INT4")
    for g in GROUPS
    for name in NARROW
}
TILE_FORMATS = {
    q: TileFormat(FORMATS[q].elements, FORMATS[q].bytes, codes.units)
    for q, codes in KERNEL_FORMATS.items()
} | OWN_FORMATS


def decode_blocks(
    rows: UInt8[Array, "... row_bytes"], qtype: str, *, dtype
) -> Float[Array, "... d"]:
    """The weights of rows of blocks: decoded in float32, rounded once to `dtype`."""
    form = TILE_FORMATS[qtype]
    if form.unpack is None:
        return decode_rows(rows, qtype, dtype=dtype)
    *lead, row_bytes = rows.shape
    code, scale, offset = form.unpack(
        rows.reshape(*lead, row_bytes // form.bytes, form.bytes)
    )
    value = scale * code.astype(jnp.float32)
    if offset is not None:
        value = value + offset
    return value.reshape(*lead, row_bytes // form.bytes * form.elements).astype(dtype)
