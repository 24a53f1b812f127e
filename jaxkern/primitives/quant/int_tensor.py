"""Integer weights of 4 and 8 bits: w = (code - zero) * scale, by group or by row."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.quant.quantized_tensor import (
    QuantizedTensor,
    check_leading_index,
    repr_of,
)
from jaxkern.primitives.quant.rounding import divide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IntTensor(QuantizedTensor):
    """A weight of shape `[..., d]`, integers with a scale for each group of a row.

        w[..., i] = (code[..., i] - zeros[..., g]) * scales[..., g], g = i // group_size

    Attributes:
      codes: 8 bits: `[..., d]`, int8 if signed, else uint8. 4 bits: `[..., d / 2]`,
        uint8, the even i in the low half of byte i // 2.
      scales: `[..., ceil(d / group_size)]`, any float dtype.
      zeros: the same shape and dtype, not always whole numbers; or None for 0 (signed)
        or 2**(bits - 1) (unsigned).
      order: `[..., d]` int32 or None. Of a `[..., f, d]` weight whose columns were
        sorted by group (GPTQ's act-order): column i belongs to input order[i].
      bits: 4 or 8.
      group_size: weights that share a scale; d for one scale a row.
      signed: codes are two's complement.

    Example:
      >>> codes, scales = jnp.array([[1, -2, 3, 4]], jnp.int8), jnp.array([[0.5]])
      >>> w = jaxkern.IntTensor(codes, scales, bits=8, group_size=4, signed=True)
      >>> jaxkern.dequantize(w)
      Array([[ 0.5, -1. ,  1.5,  2. ]], dtype=float32)
    """

    codes: Int8[Array, "... bytes"] | UInt8[Array, "... bytes"]
    scales: Float[Array, "... groups"]
    zeros: Float[Array, "... groups"] | None = None
    order: Int32[Array, "... d"] | None = None
    bits: int = field(default=8, metadata={"static": True})
    group_size: int = field(default=1, metadata={"static": True})
    signed: bool = field(default=True, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: `[..., d]`."""
        lead = self.codes.shape[:-1]
        zeros = self.scales if self.zeros is None else self.zeros
        if self.scales.shape[:-1] != lead or zeros.shape != self.scales.shape:
            raise TypeError(
                "IntTensor: `codes`, `scales`, `zeros` must share their leading dims "
                f"and the latter two all, got {self.codes.shape}, {self.scales.shape} "
                f"and {zeros.shape}."
            )
        layout = (self.bits, self.group_size, self.signed)
        return (*lead, int_width("IntTensor", self.codes, self.scales, *layout))

    def __getitem__(self, index) -> "IntTensor":
        """Index leading dims: `stack[layer]`, `experts[ids]`, `rows[2:5]`."""
        if index is ...:
            return self
        check_leading_index(self, index)
        depth = len(index) if isinstance(index, tuple) else 1
        if self.order is not None and depth > self.ndim - 2:
            raise TypeError(
                "IntTensor: rows of a weight with `order` cannot be indexed. Use "
                "quantized_embedding or dequantize(w)[...] instead."
            )
        return jax.tree.map(lambda a: a[index], self)

    def __repr__(self) -> str:
        kind = f"{'int' if self.signed else 'uint'}{self.bits} / {self.group_size}"
        return repr_of(self, kind)


@check_arguments
def quantize_int(
    w: Float[Array, "... d"],
    *,
    bits: int = 8,
    group_size: int | None = None,
    zero_point: bool = False,
) -> IntTensor:
    """Rounds rows or groups to integers, half to even.

        symmetric   scale = max |w| / n, n = 2**(bits - 1) - 1, code = round(w / scale)
        zero_point  scale = (max - min) / (2**bits - 1) with 0 inside [min, max],
                    zero = round(-min / scale), code = round(w / scale) + zero

    So 0 is exact in both, and max |w| in the first.

    Args:
      w: `[..., d]`, any float dtype; d even for 4 bits.
      bits: 4 or 8.
      group_size: weights that share a scale; None for the whole row.
      zero_point: unsigned codes with zero points.

    Returns:
      The container, its scales in w.dtype.

    Raises:
      TypeError: w is no float array, or d is odd with 4 bits.
      ValueError: `bits` or `group_size` out of range.

    Example:
      >>> w = jaxkern.quantize_int(jnp.array([[1.27, -0.5, 0.02, 0.0]]))
      >>> w.codes, w.scales
      (Array([[127, -50,   2,   0]], dtype=int8), Array([[0.01]], dtype=float32))
    """
    *lead, d = w.shape
    size = max(d, 1) if group_size is None else group_size
    check_int_options("quantize_int", bits, size)
    if bits == 4 and d % 2:
        raise TypeError(f"quantize_int: 4 bits need an even d, got {d}.")
    groups = -(-d // size)
    # the last group may be short: repeated zeros change no maximum that has 0 inside
    padded = jnp.pad(
        w.astype(jnp.float32), [*[(0, 0)] * len(lead), (0, groups * size - d)]
    )
    parts = padded.reshape(*lead, groups, size)
    low, high = (
        jnp.minimum(parts.min(-1, keepdims=True, initial=0), 0),
        jnp.maximum(parts.max(-1, keepdims=True, initial=0), 0),
    )
    if zero_point:
        first, last = 0, 2**bits - 1
        scale = divide(high - low, last)
    else:
        last = 2 ** (bits - 1) - 1
        first, scale = -last, divide(jnp.maximum(high, -low), last)
    scale = jnp.where(scale == 0, 1, scale)
    zero = jnp.round(divide(-low, scale)) if zero_point else jnp.zeros_like(scale)
    code = jnp.clip(jnp.round(divide(parts, scale)) + zero, first, last)
    codes = code.reshape(*lead, groups * size)[..., :d].astype(jnp.int32)
    return IntTensor(
        pack_int(codes, bits, not zero_point),
        scale[..., 0].astype(w.dtype),
        zero[..., 0].astype(w.dtype) if zero_point else None,
        bits=bits,
        group_size=size,
        signed=not zero_point,
    )


def check_int_options(op: str, bits: int, group_size: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"{op}: `bits` must be 4 or 8, got {bits}.")
    if group_size < 1:
        raise ValueError(f"{op}: `group_size` must be positive, got {group_size}.")


def int_width(
    op: str, codes: Array, scales: Array, bits: int, group_size: int, signed: bool
) -> int:
    """Weights in a row; TypeError in the name of `op` if the arrays do not fit."""
    check_int_options(op, bits, group_size)
    d = codes.shape[-1] * (8 // bits)
    dtype = jnp.int8 if bits == 8 and signed else jnp.uint8
    if codes.dtype != dtype:
        raise TypeError(
            f"{op}: `codes` of {bits} bits must be {jnp.dtype(dtype)}, got "
            f"{codes.dtype}."
        )
    if scales.shape[-1] != -(-d // group_size):
        raise TypeError(
            f"{op}: a row of {d} weights has {-(-d // group_size)} groups of "
            f"{group_size}, got {scales.shape[-1]} scales."
        )
    return d


def pack_int(
    codes: Int32[Array, "... d"], bits: int, signed: bool
) -> Int8[Array, "... d"] | UInt8[Array, "... bytes"]:
    """Codes as `IntTensor` holds them."""
    if bits == 8:
        return codes.astype(jnp.int8 if signed else jnp.uint8)
    *lead, d = codes.shape
    pairs = (codes & 15).reshape(*lead, d // 2, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8)


def unpack_int(
    codes: Int8[Array, "... bytes"] | UInt8[Array, "... bytes"], bits: int, signed: bool
) -> Int32[Array, "... d"]:
    """The codes as numbers."""
    if bits == 8:
        return codes.astype(jnp.int32)
    halves = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.int32)
    q = halves.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return (q ^ 8) - 8 if signed else q


def decode_int(
    codes: Int8[Array, "... bytes"] | UInt8[Array, "... bytes"],
    scales: Float[Array, "... groups"],
    zeros: Float[Array, "... groups"] | None = None,
    *,
    bits: int,
    group_size: int,
    signed: bool,
    dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    """The weights, computed in float32 or wider, rounded to `dtype` if there is one."""
    q = unpack_int(codes, bits, signed)
    wide = jnp.promote_types(scales.dtype, jnp.float32)

    def by_weight(a: Float[Array, "... groups"]) -> Float[Array, "... d"]:
        *lead, groups = a.shape
        each = jnp.repeat(a.astype(wide)[..., None], group_size, axis=-1)
        return each.reshape(*lead, groups * group_size)[..., : q.shape[-1]]

    if zeros is None:
        code = (q if signed else q - 2 ** (bits - 1)).astype(wide)
    else:
        code = q.astype(wide) - by_weight(zeros)
    w = code * by_weight(scales)
    return w if dtype is None else w.astype(dtype)
