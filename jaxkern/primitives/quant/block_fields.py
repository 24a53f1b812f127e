"""Reads the fields of packed blocks: halves, bytes, bits, words."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Integer, Shaped, UInt8


class Unpacked(NamedTuple):
    """Weights as `scale * code + offset`, group by group."""

    code: Int[Array, "... groups size"]
    scale: Float32[Array, "... groups 1"]
    offset: Float32[Array, "... groups 1"] | None = None


def from_bytes(b: UInt8[Array, "... bytes"], dtype: DTypeLike) -> Float[Array, "..."]:
    """The number that the bytes of the last dim are, lowest first."""
    if not has_symbolic_size(b):
        return lax.bitcast_convert_type(b, dtype)
    n = jnp.dtype(dtype).itemsize
    parts = b.astype(f"uint{8 * n}") << jnp.arange(0, 8 * n, 8, dtype=f"uint{8 * n}")
    return lax.bitcast_convert_type(parts.sum(-1, dtype=parts.dtype), dtype)


def to_bytes(x: Array) -> UInt8[Array, "... bytes"]:
    """The bytes of the numbers of the last dim, lowest first."""
    if not has_symbolic_size(x):
        return x.view(jnp.uint8)
    bits = 8 * x.dtype.itemsize
    word = lax.bitcast_convert_type(x, f"uint{bits}")[..., None]
    parts = (word >> jnp.arange(0, bits, 8, dtype=word.dtype)).astype(jnp.uint8)
    return parts.reshape(*x.shape[:-1], x.shape[-1] * bits // 8)


def has_symbolic_size(x: Array) -> bool:
    """Then XLA refuses a bitcast to wider or narrower elements."""
    return not all(isinstance(n, int) for n in x.shape)


def f16(b: UInt8[Array, "... 2"]) -> Float32[Array, "... 1 1"]:
    return from_bytes(b, jnp.float16).astype(jnp.float32)[..., None, None]


def i8(b: UInt8[Array, "..."]) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(b, jnp.int8).astype(jnp.int32)


def bit_fields(
    b: UInt8[Array, "... bytes"], bits: int, *, every: int, shape: tuple[int, ...]
) -> Int[Array, "..."]:
    """Bit fields, lowest first, of each run of `every` bytes, as int32 of `shape`.

    A run of bytes gives first the lowest field of every byte, then the next.
    """
    lead, n = b.shape[:-1], b.shape[-1]
    runs = b.reshape(*lead, n // every, 1, every).astype(jnp.int32)
    shift = jnp.arange(0, 8, bits, dtype=jnp.int32)[:, None]
    fields = (runs >> shift) & (2**bits - 1)
    # first merge, then split: one reshape that does both is refused on explicit meshes
    return fields.reshape(*lead, n * (8 // bits)).reshape(*lead, *shape)


def look_up(table: Sequence[int], code: Int[Array, "..."]) -> Int[Array, "..."]:
    return lax.select_n(code, *(jnp.full_like(code, value) for value in table))


def computed_once(code, scale, offset=None):
    """For fields put together from several bytes.

    Fused into the product, XLA would assemble a scale anew for each of its codes: on a
    CPU decoding is 2 to 7 times faster this way, for one byte per weight of space.
    """
    return Unpacked(*lax.optimization_barrier((code.astype(jnp.int8), scale, offset)))


def words(b: UInt8[Array, "... bytes"], size: int) -> Int[Array, "... words"]:
    """Words of `size` bytes, lowest first; of 4 bytes as uint32, else int32."""
    dtype = jnp.uint32 if size == 4 else jnp.int32
    parts = b.reshape(*b.shape[:-1], b.shape[-1] // size, size).astype(dtype)
    shifts = jnp.arange(0, 8 * size, 8, dtype=dtype)
    return jnp.sum(parts << shifts, axis=-1, dtype=dtype)


def entries(
    table: Shaped[Array, "n ..."], index: Integer[Array, "..."]
) -> Shaped[Array, "..."]:
    """Rows of a table, by codes that all name one; cut as the codes are."""
    sharding = jax.typeof(index).sharding
    whole = (None,) * (table.ndim - 1)
    cut = P(*sharding.spec, *whole) if sharding.mesh.explicit_axes else None
    return table.at[index].get(mode="promise_in_bounds", out_sharding=cut)
