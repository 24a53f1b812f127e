"""A key/value cache as a pytree: linear or a ring, each sequence at its own length."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kv_cache.update_kv_cache import update_kv_cache


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
      keys: `[b, s, k, h]`, s slots.
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

    keys: Float[Array, "b s k h"]
    values: Float[Array, "b s k hv"]
    lengths: Int32[Array, " b"]
    ring: bool = False

    @property
    def slots(self) -> int:
        return self.keys.shape[1]


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
      dtype: of keys and values.
      ring: see `KVCache`.

    Returns:
      A `KVCache` of zeros, its lengths 0.

    Raises:
      TypeError: a size or flag is not of its kind.

    Example:
      >>> cache = jaxkern.empty_kv_cache(2, 16, 1, 4)
      >>> cache.keys.shape, cache.keys.dtype, cache.lengths
      ((2, 16, 1, 4), dtype(bfloat16), Array([0, 0], dtype=int32))
    """
    value_dim = head_dim if value_dim is None else value_dim
    keys = jnp.zeros((batch, slots, kv_heads, head_dim), dtype)
    values = jnp.zeros((batch, slots, kv_heads, value_dim), dtype)
    return KVCache(keys, values, jnp.zeros(batch, jnp.int32), ring)


@check_arguments
def append_kv_cache(
    cache: KVCache,
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    new_lengths: Int[Array, " b"] | None = None,
) -> KVCache:
    """The cache with the next t tokens of each sequence; donate it to `jit`.

    Args:
      cache: of `empty_kv_cache`, or returned by an earlier call.
      key, value: `[b, t, k, h]` and `[b, t, k, hv]`, converted to the cache's dtype.
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
    write = functools.partial(update_kv_cache, ring=cache.ring)
    return KVCache(
        write(cache.keys, key, cache.lengths, new_lengths),
        write(cache.values, value, cache.lengths, new_lengths),
        cache.lengths + (t if new_lengths is None else new_lengths.astype(jnp.int32)),
        cache.ring,
    )
