"""Attention of new tokens over a cache and themselves, for every kind of cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.attention.attention import attention
from jaxkern.primitives.attention.mask import as_causal
from jaxkern.primitives.attention.paged_attention import paged_attention
from jaxkern.primitives.attention.quantized_cache_attention import (
    quantized_cache_attention,
)
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kv_cache.kv_cache import KVCache, append_kv_cache
from jaxkern.primitives.kv_cache.paged_kv_cache import (
    PagedKVCache,
    append_paged_kv_cache,
)
from jaxkern.primitives.kv_cache.update_kv_cache import ring_positions
from jaxkern.primitives.turboquant.quantize_vectors import quantize_vectors
from jaxkern.primitives.turboquant.quantized_vectors import QuantizedVectors

AnyKVCache = KVCache | PagedKVCache


@check_arguments
def cached_attention(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    cache: AnyKVCache,
    new_lengths: Int[Array, " b"] | None = None,
    *,
    window: int | tuple[int | None, int | None] | None = None,
    sinks: Float[Array, " k*g"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "b t k*g hv"], AnyKVCache]:
    """Causal attention of the next t tokens of each sequence, and the cache with them.

    One call for prefill, decode and what lies between: token i of sequence b has
    position cache.lengths[b] + i and sees every earlier token that the cache holds, or
    the last `window`, and itself. The result does not depend on how a text is cut into
    calls.

    A quantised cache takes up the new tokens first, and every query reads codes, those
    of its own call too: a prompt and a step of decoding see the same keys and values.

    Over a ring of s slots the window is at most s. While s >= window + t - 1 the new
    tokens are written first and the queries read the ring alone; else the first of
    them still need keys that the last overwrite, and old ring and new keys are joined.

    Args:
      query: `[b, t, n, h]`, already rotated, n = k*g heads.
      key: `[b, t, k, h]`, likewise.
      value: `[b, t, k, hv]`.
      cache: `KVCache` or `PagedKVCache`; donate it to `jit`.
      new_lengths: `[b]` int in 0 ... t, how many of the t tokens count, may be traced.
        The others are padding: not written, and their rows of out mean nothing.
      window: keys that a query sees, itself among them. Default all; of a ring, s. Of
        a pair (left, right), see `attention`, left counts: no key is behind a query.
      sinks, scale, softcap: as in `attention`.

    Returns:
      out: `[b, t, n, hv]`, dtype of query.
      cache: with the new tokens.

    Raises:
      ValueError: the window is larger than the ring.

    Example:
      >>> x = jnp.eye(4)[None, :, None, :2]  # [b, t, heads, h]
      >>> cache = jaxkern.empty_kv_cache(1, 8, 1, 2, dtype=jnp.float32)
      >>> prompt, cache = jaxkern.cached_attention(x[:, :3], x[:, :3], x[:, :3], cache)
      >>> out, cache = jaxkern.cached_attention(x[:, 3:], x[:, 3:], x[:, 3:], cache)
      >>> out, cache.lengths
      (Array([[[[0.25, 0.25]]]], dtype=float32), Array([4], dtype=int32))
    """
    _, window, _ = as_causal("cached_attention", window, True)
    options: dict = dict(sinks=sinks, scale=scale, softcap=softcap)
    if isinstance(cache, PagedKVCache):
        after = append_paged_kv_cache(cache, key, value, new_lengths)
        out = paged_attention(
            query,
            after.key_pages,
            after.value_pages,
            after.block_tables,
            after.lengths,
            q_offset=cache.lengths,
            window=window,
            **options,
        )
    elif cache.ring:
        after = append_kv_cache(cache, key, value, new_lengths)
        window = cache.slots if window is None else window
        if window > cache.slots:
            raise ValueError(
                f"cached_attention: window is {window} but the ring has {cache.slots} "
                "slots. Make it as large as the window."
            )
        rows = ring_rows(key, value, cache, after, new_lengths, window)
        out = attention_over(query, **rows, **options)
    else:
        after = append_kv_cache(cache, key, value, new_lengths)
        out = attention_over(
            query,
            after.keys,
            after.values,
            kv_lengths=after.lengths,
            q_offset=cache.lengths,
            causal=True,
            window=window,
            **options,
        )
    assert isinstance(out, jax.Array)  # no lse was asked for
    return out, after


def attention_over(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b s k h"] | QuantizedVectors,
    value: Float[Array, "b s k hv"] | QuantizedVectors,
    **options: Any,
) -> Float[Array, "b t k*g hv"]:
    """`attention` over the keys and values of a cache, or `quantized_cache_attention`.

    `options`: what both take, and without a quantised cache all of `attention`'s.
    """
    quantized = isinstance(key, QuantizedVectors)
    read: Any = quantized_cache_attention if quantized else attention
    return read(query, key, value, **options)


def ring_rows(key, value, cache, after, new_lengths, window):
    """The rows that the new queries read, and which of them each one sees."""
    s, t = cache.slots, key.shape[1]
    q_at = cache.lengths[:, None] + jnp.arange(t)  # [b t]
    if s >= window + t - 1:  # the ring still has all that the first query sees
        keys, values, key_at = (
            after.keys,
            after.values,
            ring_positions(after.lengths, s),
        )
        kv_lengths = jnp.minimum(after.lengths, s)
    else:
        new_at = q_at
        if new_lengths is not None:
            new_at = jnp.where(jnp.arange(t) < new_lengths[:, None], q_at, -1)
        key_at = jnp.concatenate([ring_positions(cache.lengths, s), new_at], axis=1)
        held = (key_at >= 0)[:, :, None, None]  # what is in other rows may be NaN
        keys, values = (
            joined(old, new, held)
            for old, new in ((cache.keys, key), (cache.values, value))
        )
        kv_lengths = None
    behind = q_at[:, :, None] - key_at[:, None]  # [b t rows]
    mask = (key_at >= 0)[:, None] & (behind >= 0) & (behind < window)
    return dict(key=keys, value=values, mask=mask[:, None], kv_lengths=kv_lengths)


def joined(old, new, held):
    """The rows of a ring and the new ones as they will be there; 0 where not held."""
    if isinstance(old, QuantizedVectors):
        new = quantize_vectors(new, old.codec)

    def rows(old, new):
        return jnp.where(held, jnp.concatenate([old, new.astype(old.dtype)], axis=1), 0)

    return jax.tree.map(rows, old, new)
