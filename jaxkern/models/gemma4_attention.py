"""Attention of Gemma 4: norms of the heads, rotation, and whose keys are read."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from jaxkern import KVCache, append_kv_cache, apply_rope, head_norm_rope, rms_norm
from jaxkern.models.cached_steps import attend_in_one
from jaxkern.models.gemma4_weights import Gemma4Layer, Heads
from jaxkern.primitives.attention.cached_attention import attention_over

Tables = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]


class Reading(NamedTuple):
    """How the tokens are read: into caches, of which row how many, or packed texts."""

    cached: bool
    new_lengths: Int[Array, " b"] | None
    segment_ids: Int[Array, "b t"] | None


def attended(
    config,
    i: int,
    layer: Gemma4Layer,
    y: Float[Array, "b t f"],
    table: Tables,
    cache: KVCache | None,
    seen: list[dict[str, Any]],
    reading: Reading,
) -> tuple[Float[Array, "b t n h"], KVCache | None]:
    """Attention of layer i, and its cache with the new keys where it has one.

    Args:
      y: its queries, and its keys and values where it has some, as they are projected.
      table: cos and sin of its rotation.
      cache: its own, before.
      seen: keys and values of the layers so far that have some; one more is appended.
    """
    heads, width = config.heads_of(i), config.heads * config.heads_of(i).head_dim
    q, kv = (
        part.reshape(*part.shape[:-1], -1, heads.head_dim)
        for part in (y[..., :width], y[..., width:])
    )
    window = config.window if config.windowed[i] else None
    options: dict = dict(window=window, scale=1.0)
    if cache is not None and config.fused:
        new = q, *keys_and_values(heads, kv)
        norms = layer.q_norm, layer.k_norm
        options |= dict(eps=config.eps, value_eps=config.eps, pairing="neox")
        out, own = attend_in_one(
            *new, norms, table, cache, reading.new_lengths, **options
        )
        seen.append(cached_operands(cache, own))
        return out, own
    own = None
    if config.keys_of(i) == i:
        k, v = keys_and_values(heads, kv)
        k = apply_rope(rms_norm(k, layer.k_norm, eps=config.eps), *table)
        v = rms_norm(v, eps=config.eps)
        if cache is None:
            seen.append(dict(key=k, value=v, segment_ids=reading.segment_ids))
        else:
            own = append_kv_cache(cache, k, v, reading.new_lengths)
            seen.append(cached_operands(cache, own))
    if reading.cached and config.fused:
        q = head_norm_rope(q, layer.q_norm, *table, eps=config.eps)
    else:
        q = apply_rope(rms_norm(q, layer.q_norm, eps=config.eps), *table)
    out = attention_over(q, **seen[config.keys_of(i)], causal=True, **options)
    return out, own


def keys_and_values(
    heads: Heads, kv: Float[Array, "b t n h"]
) -> tuple[Float[Array, "b t k h"], Float[Array, "b t k h"]]:
    """As they are projected."""
    k = kv[..., : heads.kv_heads, :]
    return k, k if heads.keys_as_values else kv[..., heads.kv_heads :, :]


def cached_operands(cache: KVCache, own: KVCache) -> dict[str, Any]:
    """What attention reads of a cache that has grown from `cache` to `own`."""
    return dict(
        key=own.keys, value=own.values, kv_lengths=own.lengths, q_offset=cache.lengths
    )
