"""Encoders of the simple GGUF formats: rows of floats -> the bytes of ggml's blocks.

    Q4_0 Q5_0   d = v / -2**(bits - 1), v the value of largest magnitude (the first),
                code = trunc(x / d + 2**(bits - 1) + 0.5)
    Q4_1 Q5_1   d = (max - min) / (2**bits - 1), m = min,
                code = trunc((x - m) / d + 0.5)
    Q8_0        d = max |x| / 127, code = round half away from zero (x / d)
    Q8_K        d = v / -127, code = round half to even (x / d), at most 127

    K formats, IQ4, MXFP4, ternary: `gguf_super_blocks.py`

All in float32; d and m are stored as float16 (in Q8_K as float32, beside the sums of
each 16 codes), the codes are those of the unrounded d.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.block_fields import to_bytes
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS
from jaxkern.primitives.quant.gguf_super_blocks import SUPER_BLOCK_ENCODERS
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.rounding import divide, multiply, round_half_away


@check_arguments
def quantize_gguf(
    w: Float[Array, "... d"], qtype: str, *, encoder: str = "ggml"
) -> GGUFTensor:
    """Quantises to a GGUF block format, bit-equal to `gguf.quants.quantize` if it can.

    That package has no encoders of Q2_K to Q6_K, IQ4_NL and IQ4_XS; here a search over
    the steps of each group finds the scales of least weighted error.

    Args:
      w: `[..., d]`, finite, d a multiple of the block: 32, or 256 for the K formats,
        IQ4_XS, TQ1_0 and TQ2_0.
      qtype: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
        "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0", or "Q8_K", in which
        llama.cpp holds the activations of a product with K formats. IQ1 to IQ3 have no
        encoder here: codebooks need to know how much each weight matters.
      encoder: "ggml", or for Q4_0 "absmax", which is ztensor's: d = max |x| / 7 and the
        code rounded half away from zero within [-8, 7].

    Returns:
      The container; `dequantize` and llama.cpp read both encoders' blocks.

    Raises:
      ValueError: no such encoder for this format.
      TypeError: d is no multiple of the block's elements.

    Example:
      >>> w = jaxkern.quantize_gguf(jnp.ones((4, 64)), "Q4_0")
      >>> w.blocks.shape  # 18 bytes for each 32 weights
      (4, 36)
    """
    if (qtype, encoder) not in ENCODERS:
        known = ", ".join(f"{q} {e}" for q, e in ENCODERS)
        raise ValueError(f"quantize_gguf: no {qtype!r} {encoder!r}, but {known}.")
    return GGUFTensor(quantize_gguf_p(w, qtype=qtype, encoder=encoder), qtype)


def quantize_gguf_reference(
    w: Float[Array, "... d"], *, qtype: str, encoder: str
) -> UInt8[Array, "... row_bytes"]:
    *lead, d = w.shape
    n = BLOCK_FORMATS[qtype].elements
    if d % n:
        raise TypeError(f"quantize_gguf: d = {d} is not a multiple of {n}.")
    x = w.astype(jnp.float32).reshape(*lead, d // n, n)
    blocks = ENCODERS[qtype, encoder](x)
    return blocks.reshape(*lead, blocks.shape[-2] * blocks.shape[-1])


def _inverse(d: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.where(d == 0, 0, divide(jnp.ones_like(d), jnp.where(d == 0, 1, d)))


def _truncated(x, inverse, shift: float, last: int) -> Int32[Array, "..."]:
    code = jnp.trunc(multiply(x, inverse) + shift).astype(jnp.int32)
    return jnp.clip(code, 0, last)


def _largest(x: Float32[Array, "... n"]) -> Float32[Array, "... 1"]:
    """The value of largest magnitude, of two such the first."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    n = x.shape[-1]
    place = jnp.arange(n)
    first_low = jnp.min(jnp.where(x == low, place, n), -1, keepdims=True)
    first_high = jnp.min(jnp.where(x == high, place, n), -1, keepdims=True)
    tie = (-low == high) & (first_low < first_high)
    return jnp.where((-low > high) | tie, low, high)


def _symmetric(x: Float32[Array, "... 32"], bits: int) -> UInt8[Array, "... bytes"]:
    half = 2 ** (bits - 1)
    d = _largest(x) / -half  # a power of two: exact
    return _packed(_truncated(x, _inverse(d), half + 0.5, 2 * half - 1), bits, d)


def _affine(x: Float32[Array, "... 32"], bits: int) -> UInt8[Array, "... bytes"]:
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    d = divide(high - low, 2**bits - 1)
    return _packed(_truncated(x - low, _inverse(d), 0.5, 2**bits - 1), bits, d, low)


def _absmax(x: Float32[Array, "... 32"]) -> UInt8[Array, "... bytes"]:
    d = divide(jnp.max(jnp.abs(x), -1, keepdims=True), 7)
    code = round_half_away(multiply(x, _inverse(d)))
    return _packed(jnp.clip(code, -8, 7).astype(jnp.int32) + 8, 4, d)


def _q8_0(x: Float32[Array, "... 32"]) -> UInt8[Array, "... bytes"]:
    d = divide(jnp.max(jnp.abs(x), -1, keepdims=True), 127)
    code = round_half_away(multiply(x, _inverse(d)))
    return jnp.concatenate([_f16(d), to_bytes(code.astype(jnp.int8))], axis=-1)


def _q8_k(x: Float32[Array, "... 256"]) -> UInt8[Array, "... bytes"]:
    v = _largest(x)
    inverse = divide(jnp.full_like(v, -127), jnp.where(v == 0, 1, v))  # as ggml rounds
    d = jnp.where(v == 0, 0, divide(jnp.ones_like(v), inverse))
    code = jnp.minimum(jnp.round(multiply(x, inverse)), 127).astype(jnp.int8)
    sums = code.reshape(*code.shape[:-1], 16, 16).sum(-1, dtype=jnp.int16)
    return jnp.concatenate([to_bytes(part) for part in (d, code, sums)], axis=-1)


def _packed(code: Int32[Array, "... 32"], bits: int, *scales) -> UInt8[Array, "... b"]:
    """Scales, fifth bits of elements 0 to 31, then low halves of j and j + 16."""
    parts = [_f16(s) for s in scales]
    if bits == 5:
        fifth = (code >> 4).reshape(*code.shape[:-1], 4, 8) << jnp.arange(8)
        parts.append(jnp.sum(fifth, axis=-1).astype(jnp.uint8))
    low, high = code[..., :16] & 15, code[..., 16:] & 15
    return jnp.concatenate([*parts, (low | high << 4).astype(jnp.uint8)], axis=-1)


def _f16(x: Float32[Array, "... 1"]) -> UInt8[Array, "... 2"]:
    return to_bytes(x.astype(jnp.float16))


ENCODERS = {
    ("Q4_0", "ggml"): lambda x: _symmetric(x, 4),
    ("Q4_0", "absmax"): _absmax,
    ("Q4_1", "ggml"): lambda x: _affine(x, 4),
    ("Q5_0", "ggml"): lambda x: _symmetric(x, 5),
    ("Q5_1", "ggml"): lambda x: _affine(x, 5),
    ("Q8_0", "ggml"): _q8_0,
    ("Q8_K", "ggml"): _q8_k,
    **{(q, "ggml"): encode for q, encode in SUPER_BLOCK_ENCODERS.items()},
}

quantize_gguf_p = kernel_primitive(
    quantize_gguf_reference, replicated=("d", "row_bytes")
)
