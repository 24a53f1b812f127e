"""GGUF block formats: raw bytes -> scale * code + offset  (ggml's block_q4_0 and kin).

A row of `d` weights is stored as `d / elements` blocks of `bytes` bytes. Every format
is affine in groups: a block unpacks to small integer codes `[groups, size]` with one
float32 scale and, in some formats, one float32 offset per group.

Decoding rounds at most once. An f16 scale has 11 significant bits, sub-scale and code
together at most 13, so each product fits float32's 24 bits and only the addition of an
offset (itself exact) rounds; the f32 scale of Q8_K has no offset beside it. Whether a
compiler contracts the two to a fused multiply-add or not, the bits are those of
`gguf.quants.dequantize`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, UInt8

from jaxkern.primitives.quant.block_fields import (
    Unpacked,
    bit_fields,
    computed_once,
    f16,
    from_bytes,
    i8,
    look_up,
)
from jaxkern.primitives.quant.block_formats import FORMATS
from jaxkern.primitives.quant.gguf_codebooks import UNPACK_CODEBOOKS
from jaxkern.primitives.quant.gguf_ternary import UNPACK_TERNARY

IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled e2m1


class BlockFormat(NamedTuple):
    """`elements` weights in `bytes` bytes; `unpack` is None for plain floats."""

    elements: int
    bytes: int
    unpack: Callable[[UInt8[Array, "... bytes"]], Unpacked] | None


def elements_per_row(op: str, qtype: str, row_bytes: int) -> int:
    """Weights in a row of `row_bytes` bytes; refuses in the name of `op`."""
    form = BLOCK_FORMATS.get(qtype)
    if form is None:
        raise ValueError(
            f"{op}: `qtype` is {qtype!r}, not one of {', '.join(BLOCK_FORMATS)}."
        )
    if row_bytes % form.bytes:
        raise TypeError(
            f"{op}: rows of {row_bytes} bytes are no whole {qtype} blocks of "
            f"{form.bytes} bytes."
        )
    return row_bytes // form.bytes * form.elements


def decode_rows(
    rows: UInt8[Array, "... r"], qtype: str, *, dtype: DTypeLike = jnp.float32
) -> Float[Array, "... d"]:
    """The weights of whole rows: decoded in float32, rounded once to `dtype`."""
    form = BLOCK_FORMATS[qtype]
    *lead, row_bytes = rows.shape
    blocks = rows.reshape(*lead, row_bytes // form.bytes, form.bytes)
    if form.unpack is None:
        return from_bytes(blocks, FLOAT_TYPES[qtype]).astype(dtype)
    code, scale, offset = form.unpack(blocks)
    value = scale * code.astype(jnp.float32)
    if qtype in ("MXFP4", "Q8_K"):  # the formats that reach below 2**-126
        exact = _subnormal_product(code, scale)
        value = jnp.where(jnp.abs(scale) < MIN_NORMAL, exact, value)
    if offset is not None:
        value = value + offset
    return value.reshape(*lead, blocks.shape[-2] * form.elements).astype(dtype)


def _q4_0(b):
    return Unpacked(
        bit_fields(b[..., 2:], 4, every=16, shape=(1, 32)) - 8, f16(b[..., :2])
    )


def _q4_1(b):
    code = bit_fields(b[..., 4:], 4, every=16, shape=(1, 32))
    return Unpacked(code, f16(b[..., :2]), f16(b[..., 2:4]))


def _q5_0(b):
    low = bit_fields(b[..., 6:], 4, every=16, shape=(1, 32))
    high = bit_fields(b[..., 2:6], 1, every=1, shape=(1, 32))
    return Unpacked((low | high << 4) - 16, f16(b[..., :2]))


def _q5_1(b):
    low = bit_fields(b[..., 8:], 4, every=16, shape=(1, 32))
    high = bit_fields(b[..., 4:8], 1, every=1, shape=(1, 32))
    return Unpacked(low | high << 4, f16(b[..., :2]), f16(b[..., 2:4]))


def _q8_0(b):
    return Unpacked(i8(b[..., None, 2:]), f16(b[..., :2]))


def _q2_k(b):  # scales[16] qs[64] d dmin
    scale = bit_fields(b[..., :16], 4, every=16, shape=(2, 16, 1))
    d, dmin = f16(b[..., 80:82]), f16(b[..., 82:84])
    code = bit_fields(b[..., 16:80], 2, every=32, shape=(16, 16))
    return computed_once(code, d * scale[..., 0, :, :], -dmin * scale[..., 1, :, :])


def _q3_k(b):  # hmask[32] qs[64] scales[12] d
    low = bit_fields(b[..., 32:96], 2, every=32, shape=(16, 16))
    high = bit_fields(b[..., :32], 1, every=32, shape=(16, 16))
    scale_low = bit_fields(b[..., 96:104], 4, every=8, shape=(16, 1))
    scale_high = bit_fields(b[..., 104:108], 2, every=4, shape=(16, 1))
    scale = (scale_low | scale_high << 4) - 32
    return computed_once((low | high << 2) - 4, f16(b[..., 108:]) * scale)


def _scale_and_min(b):
    """Eight 6-bit scales and eight 6-bit minima from the 12 bytes of Q4_K and Q5_K."""
    first, second, rest = (b[..., i : i + 4].astype(jnp.int32) for i in (0, 4, 8))
    scale = [first & 63, rest & 15 | first >> 6 << 4]
    minimum = [second & 63, rest >> 4 | second >> 6 << 4]
    return (jnp.concatenate(s, axis=-1)[..., None] for s in (scale, minimum))


def _q4_k(b):  # d dmin scales[12] qs[128]
    scale, minimum = _scale_and_min(b[..., 4:16])
    code = bit_fields(b[..., 16:], 4, every=32, shape=(8, 32))
    return computed_once(code, f16(b[..., :2]) * scale, -f16(b[..., 2:4]) * minimum)


def _q5_k(b):  # d dmin scales[12] qh[32] qs[128]
    scale, minimum = _scale_and_min(b[..., 4:16])
    low = bit_fields(b[..., 48:], 4, every=32, shape=(8, 32))
    high = bit_fields(b[..., 16:48], 1, every=32, shape=(8, 32))
    code = low | high << 4
    return computed_once(code, f16(b[..., :2]) * scale, -f16(b[..., 2:4]) * minimum)


def _q6_k(b):  # ql[128] qh[64] scales[16] d
    low = bit_fields(b[..., :128], 4, every=64, shape=(16, 16))
    high = bit_fields(b[..., 128:192], 2, every=32, shape=(16, 16))
    scale = i8(b[..., 192:208])[..., None]
    return computed_once((low | high << 4) - 32, f16(b[..., 208:]) * scale)


def _q8_k(b):  # d (f32) qs[256] bsums[16], sums of codes that decoding does not need
    d = from_bytes(b[..., :4], jnp.float32)[..., None, None]
    return Unpacked(i8(b[..., None, 4:260]), d)


def _iq4_nl(b):
    code = bit_fields(b[..., 2:], 4, every=16, shape=(1, 32))
    return Unpacked(look_up(IQ4_CODES, code), f16(b[..., :2]))


def _iq4_xs(b):  # d scales_h[2] scales_l[4] qs[128]
    scale_high = bit_fields(b[..., 2:4], 2, every=1, shape=(8, 1))
    scale_low = bit_fields(b[..., 4:8], 4, every=1, shape=(8, 1))
    scale = (scale_low | scale_high << 4) - 32
    code = bit_fields(b[..., 8:], 4, every=16, shape=(8, 32))
    return Unpacked(look_up(IQ4_CODES, code), f16(b[..., :2]) * scale)


def _mxfp4(b):
    e = b[..., :1, None].astype(jnp.int32)
    bits = jnp.where(e < 2, (1 << 21) << (e & 1), (e - 1) << 23)  # 2**(e - 128)
    code = bit_fields(b[..., 1:], 4, every=16, shape=(1, 32))
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    return Unpacked(look_up(E2M1_CODES, code), scale)


def _nvfp4(b):  # four unsigned e4m3 scales, qs[32]; codes are doubled, so scales halved
    e4m3 = b[..., :4, None].astype(jnp.int32)
    exponent, mantissa = e4m3 >> 3 & 15, e4m3 & 7
    normal = lax.bitcast_convert_type(
        exponent + 119 << 23 | mantissa << 20, jnp.float32
    )
    scale = jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 2.0**-10, normal)
    scale = jnp.where(e4m3 == 0x7F, 0.0, scale)
    code = bit_fields(b[..., 4:], 4, every=8, shape=(4, 16))
    return Unpacked(look_up(E2M1_CODES, code), scale)


MIN_NORMAL = 2.0**-126


def _subnormal_product(
    code: Int[Array, "..."], scale: Float32[Array, "..."]
) -> Float32[Array, "..."]:
    """code * scale for a subnormal scale, exact where the platform flushes subnormals.

    The bits of a subnormal float count units of 2**-149.
    """
    scale_bits = lax.bitcast_convert_type(scale, jnp.int32)
    units = jnp.abs(code) * (scale_bits & jnp.int32(2**31 - 1))
    normal = lax.bitcast_convert_type(units.astype(jnp.float32), jnp.int32)
    bits = jnp.where(units < 1 << 23, units, normal - (149 << 23))
    sign = (code ^ scale_bits) & jnp.int32(-(2**31))
    return lax.bitcast_convert_type(bits | sign, jnp.float32)


FLOAT_TYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}

UNPACK = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    **UNPACK_CODEBOOKS,
    **UNPACK_TERNARY,
}

BLOCK_FORMATS = {
    name: BlockFormat(form.elements, form.bytes, UNPACK.get(name))
    for name, form in FORMATS.items()
}
