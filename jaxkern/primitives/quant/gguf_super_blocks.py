"""Encoders of GGUF's blocks of 256, of IQ4_NL, MXFP4 and the ternary formats.

    Q2_K Q4_K Q5_K    scale and minimum of each group by `affine_fit`, as codes of d and
                      dmin, which are the largest of them over 15 or 63
    Q3_K Q6_K         scale of each group by `symmetric_fit`, as codes of d likewise
    IQ4_NL IQ4_XS     scale by `table_fit`, codes name one of 16 numbers
    TQ1_0 TQ2_0       d = max |x|, codes -1, 0, 1 rounded half away from zero
    MXFP4             d = 2**(floor(log2 max |x|) - 2), the nearest of 16 numbers

The weights' codes are those of the scales as they are stored, after all rounding. The
last three are the bytes of `gguf.quants.quantize`, which has no encoder of the others.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt8

from jaxkern.primitives.quant.block_fields import to_bytes
from jaxkern.primitives.quant.gguf_blocks import E2M1_CODES, IQ4_CODES
from jaxkern.primitives.quant.rounding import multiply, round_half_away
from jaxkern.primitives.quant.scale_search import (
    affine_fit,
    inverse,
    largest,
    nearest_in,
    symmetric_fit,
    table_fit,
)


def fields(
    code: Int32[Array, "... n"], bits: int, *, every: int
) -> UInt8[Array, "... bytes"]:
    """Codes as `bit_fields` reads them: of each run the lowest fields first."""
    per_byte = 8 // bits
    *lead, n = code.shape
    runs = code.reshape(*lead, n // (per_byte * every), per_byte, every)
    shifts = jnp.arange(0, 8, bits, dtype=jnp.int32)[:, None]
    packed = jnp.sum(runs << shifts, axis=-2, dtype=jnp.int32)
    return packed.astype(jnp.uint8).reshape(*lead, n // per_byte)


def grouped(x: Float32[Array, "... n"], size: int) -> Float32[Array, "... groups size"]:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def flat(code: Array) -> Array:
    return code.reshape(*code.shape[:-2], code.shape[-2] * code.shape[-1])


def half(x: Float32[Array, "... 1"]) -> tuple[Array, Array]:
    """Rounded to f16: its bytes, and the value again."""
    rounded = lax.optimization_barrier(x.astype(jnp.float16))
    return to_bytes(rounded), rounded.astype(jnp.float32)


def joined(*parts: Array) -> UInt8[Array, "... bytes"]:
    return jnp.concatenate([p.astype(jnp.uint8) for p in parts], axis=-1)


def integers(x: Float32[Array, "..."], low: int, high: int) -> Int32[Array, "..."]:
    return jnp.clip(jnp.round(x), low, high).astype(jnp.int32)


def _affine(x: Float32[Array, "... 256"], size: int, last: int, last_scale: int):
    """Bytes of d and dmin, codes of scales and minima, codes of weights."""
    groups = grouped(x, size)
    scale, minimum = affine_fit(groups, last)
    d_bytes, d = half(scale.max(-1, keepdims=True) / last_scale)
    m_bytes, m = half(minimum.max(-1, keepdims=True) / last_scale)
    scales = integers(scale * inverse(d), 0, last_scale)
    minima = integers(minimum * inverse(m), 0, last_scale)
    step, low = (d * scales)[..., None], (m * minima)[..., None]
    code = integers((groups + low) * inverse(step), 0, last)
    return d_bytes, m_bytes, scales, minima, flat(code)


def q2_k(x):  # scales[16] qs[64] d dmin
    d, m, scales, minima, code = _affine(x, 16, 3, 15)
    return joined(scales | minima << 4, fields(code, 2, every=32), d, m)


def _six_bits(scales: Int32[Array, "... 8"], minima: Int32[Array, "... 8"]):
    """The 12 bytes of Q4_K and Q5_K: the last four of each in what is left over."""
    first, last = scales[..., :4], scales[..., 4:]
    first_low, last_low = minima[..., :4], minima[..., 4:]
    return joined(
        first | last >> 4 << 6,
        first_low | last_low >> 4 << 6,
        last & 15 | last_low << 4,
    )


def q4_k(x):  # d dmin scales[12] qs[128]
    d, m, scales, minima, code = _affine(x, 32, 15, 63)
    return joined(d, m, _six_bits(scales, minima), fields(code, 4, every=32))


def q5_k(x):  # d dmin scales[12] qh[32] qs[128]
    d, m, scales, minima, code = _affine(x, 32, 31, 63)
    high, low = fields(code >> 4, 1, every=32), fields(code & 15, 4, every=32)
    return joined(d, m, _six_bits(scales, minima), high, low)


def _stepped(
    scale: Float32[Array, "... groups"], half_range: int
) -> tuple[Array, Int32[Array, "... groups"], Float32[Array, "... groups 1"]]:
    """Bytes of d, signed codes of the scales, and the scales that these make."""
    d_bytes, d = half(-largest(scale) / half_range)
    codes = integers(scale * inverse(d), -half_range, half_range - 1)
    return d_bytes, codes, (d * codes)[..., None]


def q3_k(x):  # hmask[32] qs[64] scales[12] d
    groups = grouped(x, 16)
    d, scales, step = _stepped(symmetric_fit(groups, 4), 32)
    code = flat(integers(groups * inverse(step), -4, 3)) + 4
    scales = scales + 32
    high, low = fields(code >> 2, 1, every=32), fields(code & 3, 2, every=32)
    scale_low = fields(scales & 15, 4, every=8)
    return joined(high, low, scale_low, fields(scales >> 4, 2, every=4), d)


def q6_k(x):  # ql[128] qh[64] scales[16] d
    groups = grouped(x, 16)
    d, scales, step = _stepped(symmetric_fit(groups, 32), 128)
    code = flat(integers(groups * inverse(step), -32, 31)) + 32
    low, high = fields(code & 15, 4, every=64), fields(code >> 4, 2, every=32)
    return joined(low, high, scales & 255, d)


def iq4_nl(x):  # d qs[16]
    d_bytes, d = half(table_fit(x, IQ4_CODES)[..., None])
    code, _ = nearest_in(x * inverse(d), IQ4_CODES)
    return joined(d_bytes, fields(code, 4, every=16))


def iq4_xs(x):  # d scales_h[2] scales_l[4] qs[128]
    groups = grouped(x, 32)
    d, scales, step = _stepped(table_fit(groups, IQ4_CODES), 32)
    code, _ = nearest_in(groups * inverse(step), IQ4_CODES)
    scales = scales + 32
    high, low = fields(scales >> 4, 2, every=1), fields(scales & 15, 4, every=1)
    return joined(d, high, low, fields(flat(code), 4, every=16))


def mxfp4(x):  # e[1] qs[16]
    bits = lax.bitcast_convert_type(jnp.abs(x).max(-1, keepdims=True), jnp.int32)
    e = jnp.maximum((bits >> 23) - 2, 0)
    # the codes are doubled, so the scale is halved: 2**(e - 128)
    d_bits = jnp.where(e < 2, (1 << 21) << (e & 1), (e - 1) << 23)
    d = lax.bitcast_convert_type(d_bits, jnp.float32)
    least, code = jnp.abs(x), jnp.zeros(x.shape, jnp.int32)
    for place, number in enumerate(E2M1_CODES[1:], 1):
        error = jnp.abs(multiply(d, jnp.float32(number)) - x)
        code = jnp.where(error < least, place, code)
        least = jnp.minimum(error, least)
    return joined(e, fields(code, 4, every=16))


def _ternary(x: Float32[Array, "... 256"]) -> tuple[Array, Int32[Array, "... 256"]]:
    d = jnp.abs(x).max(-1, keepdims=True)
    code = round_half_away(multiply(x, inverse(d))).astype(jnp.int32) + 1
    return half(d)[0], code


def tq1_0(x):  # qs[48] qh[4] d
    d, code = _ternary(x)

    def fractions(digits: Int32[Array, "... n"], per_byte: int, every: int):
        *lead, n = digits.shape
        runs = digits.reshape(*lead, n // (per_byte * every), per_byte, every)
        powers = 3 ** (4 - jnp.arange(per_byte, dtype=jnp.int32))[:, None]
        number = jnp.sum(runs * powers, axis=-2, dtype=jnp.int32)
        return ((number * 256 + 242) // 243).reshape(*lead, n // per_byte)

    return joined(
        fractions(code[..., :160], 5, 32),
        fractions(code[..., 160:240], 5, 16),
        fractions(code[..., 240:], 4, 4),
        d,
    )


def tq2_0(x):  # qs[64] d
    d, code = _ternary(x)
    return joined(fields(code, 2, every=32), d)


SUPER_BLOCK_ENCODERS = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
}
