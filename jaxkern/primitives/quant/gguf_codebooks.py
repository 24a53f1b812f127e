"""GGUF's codebook formats: a code names a point of a grid, 4 or 8 weights at once.

    IQ2, IQ3   weight = scale * sign * coordinate of the point
    IQ1        weight = scale * (coordinate of the point +- 1/8)

Every product is exact in float32: 11 bits of an f16 scale, at most 5 of a sub-scale and
6 of a coordinate. The points stand in `gguf_grids.py`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt8, UInt32

from jaxkern.primitives.quant.block_fields import (
    bit_fields,
    computed_once,
    entries,
    f16,
    words,
)
from jaxkern.primitives.quant.gguf_grids import grid


def points(name: str, index: Int[Array, "... n"]) -> Int[Array, "... n width"]:
    """Points of a codebook."""
    # an index has just the bits of the table's size
    return entries(jnp.asarray(grid(name)), index)


def signed(
    name: str,
    index: Int[Array, "... n"],
    signs: Int[Array, "... n*width"],
    groups: int,
) -> Int[Array, "... groups size"]:
    """Points of a codebook with the signs of their coordinates, 1 for minus."""
    coordinates = points(name, index)
    n, width = coordinates.shape[-2:]
    flat = coordinates.reshape(*index.shape[:-1], n * width)
    code = jnp.where(signs == 1, -flat, flat)
    return code.reshape(*index.shape[:-1], groups, n * width // groups)


def sign_bits(b: UInt8[Array, "... bytes"]) -> Int[Array, "... bits"]:
    """One bit a weight."""
    return bit_fields(b, 1, every=1, shape=(b.shape[-1] * 8,))


def seven_signs(word: UInt32[Array, "... n"]) -> Int[Array, "... n*32"]:
    """The signs of 32 weights from the lower 28 bits of a word.

    Seven bits for eight weights: of the eight signs an even number is minus.
    """
    sevens = word[..., None] >> jnp.arange(0, 28, 7, dtype=jnp.uint32)
    return eight_signs((sevens & 127).reshape(*word.shape[:-1], word.shape[-1] * 4))


def eight_signs(seven: Array) -> Int[Array, "... n*8"]:
    """The signs of eight weights from seven of them."""
    bits = seven.astype(jnp.int32)[..., None] >> jnp.arange(7, dtype=jnp.int32) & 1
    last = jnp.sum(bits, axis=-1, keepdims=True, dtype=jnp.int32) & 1
    signs = jnp.concatenate([bits, last], axis=-1)
    return signs.reshape(*seven.shape[:-1], seven.shape[-1] * 8)


def _iq2_xxs(b):  # d; eight times: four codes of a byte, 28 bits of signs, 4 of scale
    pairs = b[..., 2:].reshape(*b.shape[:-1], 8, 8)
    index = pairs[..., :4].astype(jnp.int32).reshape(*b.shape[:-1], 32)
    word = words(pairs[..., 4:], 4)  # [... 8 1]
    scale = _halves(f16(b[..., :2]), word >> 28)
    signs = seven_signs(word.reshape(*b.shape[:-1], 8))
    return computed_once(signed("IQ2_XXS", index, signs, 8), scale * 0.25)


def _iq2_xs(b):  # d; 32 codes of 9 bits with 7 of signs; 16 scales of 4 bits
    code = words(b[..., 2:66], 2)
    scale = _halves(f16(b[..., :2]), bit_fields(b[..., 66:], 4, every=1, shape=(16, 1)))
    signs = eight_signs(code >> 9)
    return computed_once(signed("IQ2_XS", code & 511, signs, 16), scale * 0.25)


def _iq2_s(b):  # d qs[32] signs[32] qh[8] scales[8]
    high = bit_fields(b[..., 66:74], 2, every=1, shape=(32,))
    index = b[..., 2:34].astype(jnp.int32) | high << 8
    scale = _halves(f16(b[..., :2]), bit_fields(b[..., 74:], 4, every=1, shape=(16, 1)))
    signs = sign_bits(b[..., 34:66])
    return computed_once(signed("IQ2_S", index, signs, 16), scale * 0.25)


def _iq3_xxs(b):  # d qs[64]; eight words: 28 bits of signs, 4 of scale
    word = words(b[..., 66:], 4)
    scale = _halves(f16(b[..., :2]), (word >> 28)[..., None])
    index = b[..., 2:66].astype(jnp.int32)
    return computed_once(signed("IQ3_XXS", index, seven_signs(word), 8), scale * 0.5)


def _iq3_s(b):  # d qs[64] qh[8] signs[32] scales[4]
    high = bit_fields(b[..., 66:74], 1, every=1, shape=(64,))
    index = b[..., 2:66].astype(jnp.int32) | high << 8
    scale = bit_fields(b[..., 106:], 4, every=1, shape=(8, 1))
    signs = sign_bits(b[..., 74:106])
    odd = (1 + 2 * scale).astype(jnp.float32)
    return computed_once(signed("IQ3_S", index, signs, 8), f16(b[..., :2]) * odd)


def _iq1_s(b):  # d qs[32]; eight words: 4 times 3 high bits, 3 of scale, sign of 1/8
    word = words(b[..., 34:], 2)
    high = word[..., None] >> jnp.arange(0, 12, 3, dtype=jnp.int32) & 7
    index = b[..., 2:34].astype(jnp.int32) | high.reshape(*b.shape[:-1], 32) << 8
    scale = f16(b[..., :2]) * _odd(word >> 12 & 7)[..., None]
    minus = jnp.repeat(word >> 15, 4, axis=-1, total_repeat_length=32)
    return computed_once(_shifted(index, minus, 8), scale * 0.125)


def _iq1_m(b):  # qs[32] qh[16]; four words: 4 times 3 bits of scale, 4 bits of d
    word = words(b[..., 48:], 2)
    parts = word >> 12 << jnp.arange(0, 16, 4, dtype=jnp.int32)
    bits = jnp.sum(parts, axis=-1, keepdims=True, dtype=jnp.int32).astype(jnp.uint16)
    d = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)[..., None]
    scale = word[..., None] >> jnp.arange(0, 12, 3, dtype=jnp.int32) & 7
    scale = d * _odd(scale).reshape(*b.shape[:-1], 16)[..., None]
    high = bit_fields(b[..., 32:48], 4, every=1, shape=(32,))
    index = b[..., :32].astype(jnp.int32) | (high & 7) << 8
    return computed_once(_shifted(index, high >> 3, 16), scale * 0.125)


def _halves(d: Array, scale: Array) -> Array:
    """d * (scale + 1/2)."""
    return d * (scale.astype(jnp.float32) + 0.5)


def _odd(scale: Array) -> Array:
    return (2 * scale + 1).astype(jnp.float32)


def _shifted(
    index: Int[Array, "... 32"], minus: Int[Array, "... 32"], groups: int
) -> Int[Array, "... groups size"]:
    """Eight times the weights of IQ1: all of a point lie 1/8 up, or down."""
    eighths = 8 * points("IQ1_S", index) + (1 - 2 * minus).astype(jnp.int8)[..., None]
    flat = eighths.reshape(*index.shape[:-1], 256)
    return flat.reshape(*index.shape[:-1], groups, 256 // groups)


UNPACK_CODEBOOKS = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
