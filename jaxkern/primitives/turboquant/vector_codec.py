"""Codecs of vectors: x = scale * level(code), a scale per group of dims.

Divisions by a scale and by the largest level are products with a rounded reciprocal:
XLA makes them of a division too, and kernels can round alike.

`IntCodec` has evenly spaced levels, `Float8Codec` those of an 8-bit float, and
`TurboQuantCodec` those that are best for normal numbers, after a rotation that makes
them so (https://arxiv.org/abs/2504.19874).
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.float8 import (
    FLOAT8,
    decode_float8,
    encode_float8,
    largest_float8,
)
from jaxkern.primitives.index.embedding import explicit_spec
from jaxkern.primitives.kernel_primitive import at_least_f32
from jaxkern.primitives.turboquant.fwht import hadamard_product
from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook
from jaxkern.primitives.turboquant.rotate import rotation_signs


@dataclass(frozen=True)
class IntCodec:
    """Symmetric integers: x = scale * q with |q| <= 2**(bits - 1) - 1 = top.

        scale = max |x| / top,    q = round(x / scale), halves to even

    The code is q + 2**(bits - 1). For keys and values 8 bits with one scale a vector,
    or 4 bits with one for every 32 dims, are usual.

    Attributes:
      bits: 2 to 8.
      group: how many neighbouring dims share a scale; None for all of a vector.

    Example:
      >>> x = jaxkern.quantize_vectors(jnp.array([1.0, -0.5]), jaxkern.IntCodec(8))
      >>> x.codes  # q + 128
      Array([255,  64], dtype=uint8)
    """

    bits: int = 8
    group: int | None = None

    def __post_init__(self):
        if self.bits not in range(2, 9):
            raise ValueError(f"IntCodec: `bits` must be 2 to 8, got {self.bits!r}.")
        check_group(self)

    def signs(self, d: int) -> None:
        """No rotation."""

    def scales(self, x: Float[Array, "... g"]) -> Float[Array, "..."]:
        return jnp.max(jnp.abs(x), axis=-1) * (1 / self.top)

    def codes(self, z: Float[Array, "... d"]) -> UInt8[Array, "... d"]:
        q = jnp.clip(jnp.round(z), -self.top, self.top)
        return (q + 2 ** (self.bits - 1)).astype(jnp.uint8)

    def levels(self, codes: UInt8[Array, "... d"], dtype) -> Float[Array, "... d"]:
        return codes.astype(dtype) - 2 ** (self.bits - 1)

    def table(self) -> np.ndarray:
        """The level of every code, `[2**bits]` float64."""
        return np.arange(2.0**self.bits) - 2 ** (self.bits - 1)

    @property
    def top(self) -> int:
        return 2 ** (self.bits - 1) - 1


@dataclass(frozen=True)
class Float8Codec:
    """8-bit floats: x = scale * q with |q| <= 448 in e4m3fn.

        scale = max |x| / 448,    q = the nearest float, ties to even

    The code is the float's bits. Small coordinates keep their relative precision of
    1 / 16, where an IntCodec of 8 bits has steps of the largest one's 1 / 127.

    Attributes:
      group: how many neighbouring dims share a scale; None for all of a vector.

    Example:
      >>> x = jnp.array([100.0, -0.1])
      >>> y = jaxkern.quantize_vectors(x, jaxkern.Float8Codec())
      >>> jaxkern.dequantize_vectors(y)
      Array([100.   ,  -0.098], dtype=float32)
    """

    group: int | None = None

    bits: ClassVar[int] = 8
    form: ClassVar[str] = "e4m3fn"

    def __post_init__(self):
        check_group(self)

    def signs(self, d: int) -> None:
        """No rotation."""

    def scales(self, x: Float[Array, "... g"]) -> Float[Array, "..."]:
        return jnp.max(jnp.abs(x), axis=-1) * (1 / largest_float8(self.form))

    def codes(self, z: Float[Array, "... d"]) -> UInt8[Array, "... d"]:
        return encode_float8(z, self.form)

    def levels(self, codes: UInt8[Array, "... d"], dtype) -> Float[Array, "... d"]:
        return decode_float8(codes, self.form).astype(dtype)

    def table(self) -> np.ndarray:
        """The level of every code, `[256]` float64."""
        return np.arange(256, dtype=np.uint8).view(FLOAT8[self.form]).astype(np.float64)


@dataclass(frozen=True)
class TurboQuantCodec:
    """Rotated vectors in the levels that are best for normal numbers.

        y = R x,    scale = sqrt(mean y**2) over a group,    code = nearest level

    R is `rotate`'s, over the whole vector, whatever the group. The levels are those of
    `lloyd_max_codebook(bits)`; a number midway between two takes the lower one. 2.25
    bits are 3 for the first quarter of the dims and 2 for the others: elsewhere this
    mode is called 2.5 bits, which it is not.

    The relative squared error of a long vector is `lloyd_max_error(bits)`: 0.0095 at 4
    bits. What comes back is shorter by as much, as in every quantiser whose levels are
    means: divide by 1 - lloyd_max_error(bits) for unbiased inner products.

    Attributes:
      bits: 1 to 8, or 2.25.
      group: how many neighbouring dims share a scale, all of a vector that has fewer.
      seed: of the rotation's signs, see `rotation_signs`; None for the fixed table.
      codebook: other levels, 2**bits ascending numbers.

    Example:
      >>> codec = jaxkern.TurboQuantCodec(4)
      >>> jaxkern.quantize_vectors(jnp.ones((3, 64)), codec).codes.shape
      (3, 32)
    """

    bits: float = 4
    group: int | None = 256
    seed: int | None = None
    codebook: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.bits not in (*range(1, 9), 2.25):
            raise ValueError(
                f"TurboQuantCodec: `bits` must be 1 to 8 or 2.25, got {self.bits!r}."
            )
        check_group(self)
        levels = self.codebook
        if levels is not None and not (
            isinstance(levels, tuple)
            and len(levels) == 2**self.bits
            and all(a < b for a, b in itertools.pairwise(levels))
        ):
            raise ValueError(
                f"TurboQuantCodec: `codebook` must be a tuple of 2**{self.bits} "
                f"ascending numbers, got {levels!r}."
            )

    def signs(self, d: int) -> np.ndarray:
        return rotation_signs(d, self.seed)

    def scales(self, x: Float[Array, "... g"]) -> Float[Array, "..."]:
        square = jnp.mean(x * x, axis=-1)
        none = square == 0
        return jnp.where(none, 0, jnp.sqrt(jnp.where(none, 1, square)))

    def codes(self, z: Float[Array, "... d"]) -> UInt8[Array, "... d"]:
        return self.by_part(z, nearest)

    def levels(self, codes: UInt8[Array, "... d"], dtype) -> Float[Array, "... d"]:
        return self.by_part(
            codes, lambda part, table: look_up(jnp.asarray(table, dtype), part)
        )

    def table(self) -> np.ndarray:
        """The level of every code, `[2**bits]` float64; of whole bits only."""
        return np.asarray(self.codebook or lloyd_max_codebook(int(self.bits)))

    def by_part(self, x, f):
        """f(dims, levels) for the dims that have the same levels."""
        if self.bits != 2.25:
            return f(x, self.table())
        few = x.shape[-1] // 4
        parts = (x[..., :few], 3), (x[..., few:], 2)
        return jnp.concatenate(
            [f(part, lloyd_max_codebook(bits)) for part, bits in parts], axis=-1
        )


VectorCodec = IntCodec | Float8Codec | TurboQuantCodec


def nearest(
    z: Float[Array, "... d"], levels: Sequence[float] | np.ndarray
) -> UInt8[Array, "... d"]:
    """The number of the level nearest to z, by bisection over the midpoints."""
    levels = np.asarray(levels)
    midpoints = jnp.asarray((levels[1:] + levels[:-1]) / 2, z.dtype)
    code = jnp.zeros_like(z, jnp.uint8)
    step = len(levels) // 2
    while step:
        above = z > look_up(midpoints, code + np.uint8(step - 1))
        code = code + jnp.where(above, np.uint8(step), np.uint8(0))
        step //= 2
    return code


def look_up(table: Array, index: UInt8[Array, "... d"]) -> Array:
    spec = explicit_spec(*jax.typeof(index).sharding.spec)
    return table.at[index].get(mode="promise_in_bounds", out_sharding=spec)


def encode(
    op: str, x: Float[Array, "... d"], codec: VectorCodec
) -> tuple[UInt8[Array, "... code_bytes"], Float[Array, "... groups"]]:
    """Packed codes and scales; scales in float32, or float64 for a float64 x."""
    *lead, d = x.shape
    check_dims(op, codec, d)
    y = at_least_f32(x)
    signs = codec.signs(d)
    if signs is not None:
        y = hadamard_product(y * signs)
    size = group_size(codec, d)
    y = y.reshape(*lead, d // size, size)
    scales = codec.scales(y)
    inverse = 1 / jnp.where(scales == 0, 1, scales)
    z = lax.stop_gradient(y * inverse[..., None])
    return pack(codec.codes(z.reshape(*lead, d)), planes(codec, d)), scales


def decode(
    op: str,
    codes: UInt8[Array, "... code_bytes"],
    scales: Float[Array, "... groups"],
    codec: VectorCodec,
) -> Float[Array, "... d"]:
    """scale * level(code), in the dtype of at_least_f32(scales), still rotated."""
    scales = at_least_f32(scales)
    levels = decode_levels(op, codes, scales.shape[-1], codec, scales.dtype)
    *lead, groups, size = levels.shape
    return (levels * scales[..., None]).reshape(*lead, groups * size)


def decode_levels(
    op: str,
    codes: UInt8[Array, "... code_bytes"],
    groups: int,
    codec: VectorCodec,
    dtype: jnp.dtype,
) -> Float[Array, "... groups g"]:
    """level(code), the dims of a group together."""
    d = num_dims(op, codec, codes.shape[-1])
    size = group_size(codec, d)
    if groups * size != d:
        raise TypeError(f"{op}: {groups} scales for {d} dims, {codec} has {d // size}.")
    levels = codec.levels(unpack(codes, planes(codec, d), d), dtype)
    return levels.reshape(*codes.shape[:-1], groups, size)


# Sizes. Codes are stored in planes of 8, 4, 2 or 1 bits, as many of each as make up the
# code, the lowest bits first: 5 bits are a plane of 4 and one of 1. A plane has its
# first dim in the lowest bits of its first byte.


def planes(codec: VectorCodec, d: int) -> list[tuple[int, int]]:
    """(bits, how many of the first dims have them) for each plane of d dims."""
    if codec.bits == 2.25:
        return [(2, d), (1, d // 4)]
    return [(width, d) for width in (8, 4, 2, 1) if int(codec.bits) & width]


def code_bytes(codec: VectorCodec, d: int) -> int:
    return sum(width * count // 8 for width, count in planes(codec, d))


def num_dims(op: str, codec: VectorCodec, num_bytes: int) -> int:
    d = int(num_bytes * 8 / codec.bits)
    if code_bytes(codec, d) != num_bytes:
        raise TypeError(f"{op}: {num_bytes} bytes are no whole vector of {codec}.")
    check_dims(op, codec, d)
    return d


def group_size(codec: VectorCodec, d: int) -> int:
    return d if codec.group is None else min(codec.group, d)


def check_dims(op: str, codec: VectorCodec, d: int) -> None:
    """Raises TypeError unless the codec can take vectors of d dims."""
    bytes_are_full = all(width * n % 8 == 0 for width, n in planes(codec, d))
    if d < 1 or d % group_size(codec, d) or not bytes_are_full:
        raise TypeError(
            f"{op}: vectors of {d} dims do not fit {codec}: they must have whole "
            "groups and fill whole bytes."
        )
    if isinstance(codec, TurboQuantCodec) and d & (d - 1):
        raise TypeError(f"{op}: the last dim must be a power of two, got {d}.")


def check_group(codec: VectorCodec) -> None:
    if codec.group is not None and codec.group < 1:
        raise ValueError(
            f"{type(codec).__name__}: `group` must be 1 or more, got {codec.group}."
        )


def pack(
    codes: UInt8[Array, "... d"], planes: list[tuple[int, int]]
) -> UInt8[Array, "... code_bytes"]:
    """Codes in planes, one plane after the other."""
    packed, below = [], 0
    for width, count in planes:
        part = (codes[..., :count] >> below) & (2**width - 1)
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        part = part.reshape(*codes.shape[:-1], count // len(shifts), len(shifts))
        packed.append(jnp.sum(part << shifts, axis=-1, dtype=jnp.uint8))
        below += width
    return jnp.concatenate(packed, axis=-1)


def unpack(
    packed: UInt8[Array, "... code_bytes"], planes: list[tuple[int, int]], d: int
) -> UInt8[Array, "... d"]:
    """The inverse of pack."""
    *lead, _ = packed.shape
    parts, start, below = [], 0, 0
    for width, count in planes:
        end = start + count * width // 8
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        part = (packed[..., start:end, None] >> shifts) & (2**width - 1)
        part = part.reshape(*lead, count) << below
        rest = [(0, 0)] * len(lead) + [(0, d - count)]
        parts.append(jnp.pad(part, rest) if count < d else part)
        start, below = end, below + width
    return functools.reduce(operator.or_, parts)
