"""`prefill` and `decode` of any page, and what its layers share about the cache."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxkern import (
    KVCache,
    NormRope,
    attention,
    cached_attention,
    qk_norm_rope_cache,
    qk_norm_rope_cache_attention,
    qk_norm_rope_quantized_cache,
    sigmoid_gate,
)
from jaxkern.models.architecture import Cache, page_of
from jaxkern.primitives.attention.cached_attention import attention_over
from jaxkern.primitives.attention.qk_norm_rope_cache_attention import heads_and_gates
from jaxkern.primitives.rope.rope import Pairing


def prefill(
    config: Any,
    weights: Any,
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, " b"],
    cache: Cache,
    images: Any = None,
) -> tuple[Float[Array, "b v"], Cache]:
    """Reads t tokens of each sequence and gives the logits of the one that follows.

    Rows may differ in length: they start at the left, and what stands behind
    `lengths[b]` has no influence. Called again it goes on where the cache ends.

    Args:
      config, weights: of `jaxkern.models.load`.
      tokens: `[b, t]`.
      lengths: `[b]`, how many of the t tokens count. Where it is 0 the sequence stays
        as it is, and its logits mean nothing.
      cache: of the page's `empty_cache`, or returned by an earlier call. Donate it.
      images: of a page that reads them, what placeholders among the tokens stand for
        (`jaxkern.models.image_prompts`).

    Returns:
      logits: `[b, v]` float32, after the last token that counts.
      cache: with `lengths` more tokens per sequence.
    """
    page = page_of(config)
    shown = {} if images is None else {"images": images}
    x, after = page.hidden_states(config, weights, tokens, cache, lengths, **shown)
    assert after is not None  # as it went in
    if tokens.shape[1] == 1:
        return page.logits(config, weights, x)[:, 0], after
    at = jnp.maximum(lengths - 1, 0)
    last = jnp.take_along_axis(x, at[:, None, None], axis=1)  # [b, 1, d]
    return page.logits(config, weights, last)[:, 0], after


def decode(
    config: Any,
    weights: Any,
    tokens: Int32[Array, " b"],
    cache: Cache,
    counts: Int32[Array, " b"] | None = None,
) -> tuple[Float[Array, "b v"], Cache]:
    """Adds one token to each sequence: `prefill` with t = 1.

    `counts`, 0 or 1, says to which; default to all.

    Returns:
      logits: `[b, v]` float32.
      cache: with one more token per sequence.
    """
    counts = jnp.ones_like(tokens) if counts is None else counts
    return prefill(config, weights, tokens[:, None], counts, cache)


def with_lengths(cache: Cache, lengths: Int32[Array, " b"]) -> Cache:
    """The cache with one array of lengths, so that a loop carries only that one."""
    return tuple(replace(own, lengths=lengths) for own in cache)


def next_positions(
    tokens: Int32[Array, "b t"],
    cache: Cache | None,
    segment_ids: Int[Array, "b t"] | None = None,
) -> Int32[Array, "b t"]:
    """Where the tokens stand in their texts.

    Behind those in the cache; without one from 0, anew where segment_ids changes.
    """
    t = tokens.shape[1]
    if cache is not None:
        return cache[0].lengths[:, None] + jnp.arange(t)
    at = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), tokens.shape)
    if segment_ids is None:
        return at
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.where(jnp.pad(begins, ((0, 0), (1, 0))), at, 0)
    return at - jax.lax.cummax(starts, axis=1)


def text_lengths(
    tokens: Int32[Array, "b t"],
    cache: Cache,
    new_lengths: Int[Array, " b"] | None,
) -> Int32[Array, " b"]:
    """How long the texts are with the new tokens."""
    return cache[0].lengths + (tokens.shape[1] if new_lengths is None else new_lengths)


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    cache: KVCache | None,
    new_lengths: Int[Array, " b"] | None,
    segment_ids: Int[Array, "b t"] | None,
    **options: Any,
) -> tuple[Float[Array, "b t n hv"], KVCache | None]:
    """Causal attention over the cache and the new tokens, or without one over these.

    `options`: window, sinks, scale and softcap of `attention`.
    """
    if cache is None:
        y = attention(q, k, v, causal=True, segment_ids=segment_ids, **options)
        assert isinstance(y, jax.Array)  # no lse was asked for
        return y, None
    y, after = cached_attention(q, k, v, cache, new_lengths, **options)
    assert isinstance(after, KVCache)  # as it went in
    return y, after


def attend_in_one(
    q: Float[Array, "b t n q"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    norms: tuple[Float[Array, " h"] | None, Float[Array, " h"] | None],
    rotation: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    cache: KVCache,
    new_lengths: Int[Array, " b"] | None,
    *,
    eps: float,
    pairing: Pairing,
    value_eps: float | None = None,
    gated: bool = False,
    **options: Any,
) -> tuple[Float[Array, "b t n h"], KVCache]:
    """Norms of the heads, rotation and the write to a linear cache, then attention.

    Two ops, of which the first does all but attention; on a GPU one op for one token,
    where the cache is not quantised. Where `gated`, q has output gates as well.
    """
    grown = q.shape[1] if new_lengths is None else new_lengths
    after = cache.lengths + grown
    new = q, k, v, norms, rotation
    into: tuple = cache.keys, cache.values, cache.lengths, new_lengths
    turn = NormRope(None if norms[0] is None else eps, value_eps, pairing=pairing)
    one_op = q.shape[1] == 1 and jax.default_backend() == "gpu"
    if one_op and not cache.quantized:
        options |= dict(gated=gated, norm_rope=turn)
        y, keys, values = qk_norm_rope_cache_attention(*new, *into, **options)
        return y, replace(cache, keys=keys, values=values, lengths=after)
    write: Any = qk_norm_rope_cache
    if cache.quantized:
        write = qk_norm_rope_quantized_cache
    q, gate = heads_and_gates(q, k.shape[-1], gated)
    q, keys, values = write(q, *new[1:], *into, norm_rope=turn)
    y = attention_over(
        q,
        keys,
        values,
        kv_lengths=after,
        q_offset=cache.lengths,
        causal=True,
        **options,
    )
    y = y if gate is None else sigmoid_gate(y, gate)
    return y, replace(cache, keys=keys, values=values, lengths=after)
