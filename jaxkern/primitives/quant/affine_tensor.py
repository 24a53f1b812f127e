"""MLX's affine format: w = scale * code + bias, codes of 2 to 8 bits in groups.

The codes of a row are one stream of bits, lowest first, in 32-bit words: code i holds
the bits [i * bits, (i + 1) * bits). With 3, 5 and 6 bits a code may cross two words.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt, UInt8, UInt32

from jaxkern.primitives.quant.quantized_tensor import (
    QuantizedTensor,
    check_leading_index,
    repr_of,
)

BITS = (2, 3, 4, 5, 6, 8)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AffineTensor(QuantizedTensor):
    """A weight of shape `[..., d]`, affine in groups along its last dim.

        w[..., g * group_size + i] = scales[..., g] * code + biases[..., g]

    Attributes:
      codes: `[..., d * bits / 32]`, uint32, exactly the words of `mx.quantize`; or
        `[..., d]`, uint8, one code a byte.
      scales: `[..., d / group_size]`, any float dtype.
      biases: the same shape.
      bits: 2, 3, 4, 5, 6 or 8.
      group_size: weights that share a scale; MLX has 32, 64 and 128.

    Example:
      >>> codes = jnp.arange(8, dtype=jnp.uint8)[None]  # one code a byte
      >>> scales, biases = jnp.array([[0.5]]), jnp.array([[-1.0]])
      >>> w = jaxkern.AffineTensor(codes, scales, biases, bits=4, group_size=8)
      >>> jaxkern.dequantize(w)
      Array([[-1. , -0.5,  0. ,  0.5,  1. ,  1.5,  2. ,  2.5]], dtype=float32)
    """

    codes: UInt32[Array, "... words"] | UInt8[Array, "... d"]
    scales: Float[Array, "... groups"]
    biases: Float[Array, "... groups"]
    bits: int = field(metadata={"static": True})
    group_size: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: `[..., d]`."""
        lead = self.codes.shape[:-1]
        if self.scales.shape != self.biases.shape or self.scales.shape[:-1] != lead:
            raise TypeError(
                "AffineTensor: `codes`, `scales` and `biases` must share their leading "
                f"dims and the latter two all, got {self.codes.shape}, "
                f"{self.scales.shape} and {self.biases.shape}."
            )
        d = affine_width(
            "AffineTensor", self.codes, self.scales, self.bits, self.group_size
        )
        return (*lead, d)

    def __getitem__(self, index) -> "AffineTensor":
        """Index leading dims: `stack[layer]`, `experts[ids]`, `rows[2:5]`."""
        if index is ...:
            return self
        check_leading_index(self, index)
        return jax.tree.map(lambda a: a[index], self)

    def __repr__(self) -> str:
        return repr_of(self, f"{self.bits} bits / {self.group_size}")


def affine_width(
    op: str, codes: Array, scales: Array, bits: int, group_size: int
) -> int:
    """Weights in a row; TypeError in the name of `op` if the arrays do not fit."""
    check_affine_options(op, bits, group_size)
    d = scales.shape[-1] * group_size
    words = d if codes.dtype == jnp.uint8 else d * bits // 32
    if codes.dtype not in (jnp.uint8, jnp.uint32) or codes.shape[-1] != words:
        raise TypeError(
            f"{op}: rows of {scales.shape[-1]} groups of {group_size} need {words} "
            f"words of uint32 or {d} of uint8 at {bits} bits, got "
            f"{codes.dtype}{list(codes.shape)}."
        )
    return d


def check_affine_options(op: str, bits: int, group_size: int) -> None:
    if bits not in BITS:
        raise ValueError(f"{op}: `bits` must be one of {BITS}, got {bits}.")
    if group_size < 1 or group_size * bits % 32:
        raise ValueError(
            f"{op}: a group must fill whole 32-bit words, got group_size={group_size} "
            f"of {bits} bits. Use 32, 64 or 128."
        )


def decode_affine(
    codes: UInt[Array, "... words"],
    scales: Float[Array, "... groups"],
    biases: Float[Array, "... groups"],
    *,
    bits: int,
    group_size: int,
    dtype: jnp.dtype | None,
    dequant_dtype: jnp.dtype | None = None,
) -> Float[Array, "... d"]:
    """The weights, computed in float32 or wider, rounded to `dtype` if there is one.

    With a `dequant_dtype` the operands, the product and the sum are rounded to it.
    """
    code = grouped_codes(codes, bits, group_size)
    wide = jnp.promote_types(scales.dtype, jnp.float32)

    def rounded(y: Array) -> Array:
        if dequant_dtype is None:
            return y
        info = jnp.finfo(dequant_dtype)  # astype alone may keep excess precision,
        y = lax.reduce_precision(y, info.nexp, info.nmant)
        return lax.optimization_barrier(y)  # and a float32 product joins its sum

    scale, bias = (rounded(a.astype(wide))[..., None] for a in (scales, biases))
    w = rounded(rounded(scale * code.astype(wide)) + bias)
    w = w.reshape(*w.shape[:-2], w.shape[-2] * group_size)
    return w if dtype is None else w.astype(dtype)


def grouped_codes(
    codes: UInt[Array, "... words"], bits: int, group_size: int
) -> UInt[Array, "... groups size"]:
    q = codes if codes.dtype == jnp.uint8 else unpack_codes(codes, bits)
    return q.reshape(*q.shape[:-1], q.shape[-1] // group_size, group_size)


def unpack_codes(words: UInt32[Array, "... words"], bits: int) -> UInt8[Array, "... d"]:
    """The codes of each row of packed words."""
    piece = math.gcd(bits, 32)  # a code is whole pieces, and so is a word
    shifts = jnp.arange(0, 32, piece, dtype=jnp.uint32)
    pieces = (words[..., None] >> shifts) & (2**piece - 1)
    *lead, n, per_word = pieces.shape
    stream = pieces.reshape(*lead, n * per_word)
    parts = stream.reshape(*lead, n * 32 // bits, bits // piece)
    places = jnp.arange(0, bits, piece, dtype=jnp.uint32)
    return jnp.sum(parts << places, axis=-1, dtype=jnp.uint32).astype(jnp.uint8)


def pack_codes(codes: UInt8[Array, "... d"], bits: int) -> UInt32[Array, "... words"]:
    """The inverse of `unpack_codes`; `d * bits` must be a multiple of 32."""
    piece = math.gcd(bits, 32)
    places = jnp.arange(0, bits, piece, dtype=jnp.uint32)
    parts = (codes[..., None].astype(jnp.uint32) >> places) & (2**piece - 1)
    *lead, d, per_code = parts.shape
    stream = parts.reshape(*lead, d * per_code)
    pieces = stream.reshape(*lead, d * bits // 32, 32 // piece)
    shifts = jnp.arange(0, 32, piece, dtype=jnp.uint32)
    return jnp.sum(pieces << shifts, axis=-1, dtype=jnp.uint32)
