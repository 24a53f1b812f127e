"""A key/value cache as a pytree: linear or a ring, each sequence at its own length.

Keys and values are arrays, or quantised: what writes and reads them asks the cache.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kv_cache.update_kv_cache import update_kv_cache
from jaxkern.primitives.kv_cache.update_quantized_kv_cache import (
    update_quantized_kv_cache,
)
from jaxkern.primitives.turboquant.quantized_vectors import QuantizedVectors
from jaxkern.primitives.turboquant.vector_codec import VectorCodec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "lengths"],
    meta_fields=["ring"],
)
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of what b sequences have read; `cached_attention` uses it.

    The token at position p is in slot p, and one behind the last slot is dropped: no
    query sees it. In a ring its slot is p mod s, and the last s tokens stay. Positions
    go on either way, so a full linear cache is `lengths >= slots`.

    Attributes:
      keys: `[b, s, k, h]`, s slots; an array or QuantizedVectors, as are the values.
      values: `[b, s, k, hv]`.
      lengths: `[b]` int32, tokens that each sequence has had; with the ones that were
        dropped or overwritten.
      ring: static.

    Example:
      >>> cache = jaxkern.empty_kv_cache(2, 16, 1, 4, ring=True)
      >>> isinstance(cache, jaxkern.KVCache)
      True
      >>> cache.keys.shape, cache.lengths, cache.ring
      ((2, 16, 1, 4), Array([0, 0], dtype=int32), True)
    """

    keys: Float[Array, "b s k h"] | QuantizedVectors
    values: Float[Array, "b s k hv"] | QuantizedVectors
    lengths: Int32[Array, " b"]
    ring: bool = False

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def quantized(self) -> bool:
        return isinstance(self.keys, QuantizedVectors)


@check_arguments
def empty_kv_cache(
    batch: int,
    slots: int,
    kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: Any = jnp.bfloat16,
    ring: bool = False,
) -> KVCache:
    """A cache of one layer without tokens; for a sliding window of s tokens a ring.

    Args:
      batch, slots, kv_heads, head_dim: b, s, k, h.
      value_dim: hv, default h.
      dtype: of keys and values; or a codec (IntCodec, Float8Codec, TurboQuantCodec),
        by which each new vector is quantised and attention reads the codes.
      ring: see `KVCache`.

    Returns:
      A `KVCache` of zeros, its lengths 0.

    Raises:
      TypeError: a size or flag is not of its kind, or the codec does not fit the dims.

    Example:
      >>> cache = jaxkern.empty_kv_cache(2, 16, 1, 4)
      >>> cache.keys.shape, cache.keys.dtype, cache.lengths
      ((2, 16, 1, 4), dtype(bfloat16), Array([0, 0], dtype=int32))
      >>> cache = jaxkern.empty_kv_cache(2, 16, 1, 4, dtype=jaxkern.IntCodec(8))
      >>> cache.keys
      QuantizedVectors(IntCodec(bits=8, group=None), shape=(2, 16, 1, 4))
    """

    def zeros(dim: int):
        shape = (batch, slots, kv_heads, dim)
        if isinstance(dtype, VectorCodec):
            return QuantizedVectors.zeros(shape, dtype)
        return jnp.zeros(shape, dtype)

    keys = zeros(head_dim)
    values = zeros(head_dim if value_dim is None else value_dim)
    return KVCache(keys, values, jnp.zeros(batch, jnp.int32), ring)


@check_arguments
def append_kv_cache(
    cache: KVCache,
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    new_lengths: Int[Array, " b"] | None = None,
) -> KVCache:
    """The cache with the next t tokens of each sequence; donate it to `jit`.

        keys[b, lengths[b] + i] = key[b, i]      for i = 0 ... new_lengths[b] - 1

    and likewise the values; in a ring of s slots the slot is modulo s.

    Args:
      cache: of `empty_kv_cache`, or returned by an earlier call.
      key, value: `[b, t, k, h]` and `[b, t, k, hv]`, converted to the cache's dtype or
        quantised by its codec.
      new_lengths: `[b]` int in 0 ... t, how many of the t tokens count, default all.

    Returns:
      The cache, its lengths grown by the tokens that count.

    Raises:
      TypeError: `cache` is no KVCache, or shapes or dtypes do not fit.

    Example:
      >>> cache = jaxkern.empty_kv_cache(2, 16, 1, 4)
      >>> new = jnp.ones((2, 3, 1, 4))
      >>> jaxkern.append_kv_cache(cache, new, new, jnp.array([3, 1])).lengths
      Array([3, 1], dtype=int32)
    """
    t = key.shape[1]
    update: Any = update_quantized_kv_cache if cache.quantized else update_kv_cache
    write = functools.partial(update, ring=cache.ring)
    return KVCache(
        write(cache.keys, key, cache.lengths, new_lengths),
        write(cache.values, value, cache.lengths, new_lengths),
        cache.lengths + (t if new_lengths is None else new_lengths.astype(jnp.int32)),
        cache.ring,
    )
