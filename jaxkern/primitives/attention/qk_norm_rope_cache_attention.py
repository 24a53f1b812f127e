"""From the projections of a layer to its output projection: a step of decoding.

out = attention(q', K', V'), where q', K', V' = qk_norm_rope_cache(q, k, v, K, V)
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.activation.sigmoid_gate import sigmoid_gate_reference
from jaxkern.primitives.attention.attention import attention_reference
from jaxkern.primitives.attention.mask import checked_visibility
from jaxkern.primitives.attention.operands import AttentionOperands
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.kv_cache.norm_rope import NormRope, as_operands
from jaxkern.primitives.kv_cache.qk_norm_rope_cache import (
    NewTokens,
    normed_value,
    turned,
)
from jaxkern.primitives.kv_cache.update_kv_cache import update_kv_cache_reference
from jaxkern.primitives.rope.rope import NormedRotation

OP = "qk_norm_rope_cache_attention"


@check_arguments
def qk_norm_rope_cache_attention(
    query: Float[Array, "b t k*g q"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    norm_weights: tuple[Float[Array, " h"] | None, Float[Array, " h"] | None],
    tables: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    key_cache: Float[Array, "b s k h"],
    value_cache: Float[Array, "b s k hv"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None = None,
    sinks: Float[Array, " k*g"] | None = None,
    *,
    gated: bool = False,
    norm_rope: NormRope = NormRope(),
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[
    Float[Array, "b t k*g hv"], Float[Array, "b s k h"], Float[Array, "b s k hv"]
]:
    """Attention of new tokens over a cache that takes them up, from their projections.

        query, key_cache, value_cache = qk_norm_rope_cache(query, key, value, ...)
        out = attention(query, key_cache, value_cache, causal=True, q_offset=positions,
                        kv_lengths=positions + new_lengths)

    with the same roundings. All that a layer does between its first product and its
    second, so that one launch does it for the token of a decode step. Donate the caches
    to `jit`, or carry them through a loop: they are written in place.

    Where `gated`, each head of `query` has its output gate behind it, as the product
    gives them (Qwen3-Next, Qwen3.5): out is sigmoid_gate(out, gate).

    Args:
      query: `[b, t, n, h]`, any float dtype; n = k*g heads, a multiple of key's. Where
        `gated`, `[b, t, n, h + hv]`.
      key, value: `[b, t, k, h]` and `[b, t, k, hv]`, any float dtype.
      norm_weights: of the queries and of the keys, each `[h]`, or None for no scale.
      tables: cos and sin, `[b, t, r]` or `[t, r]`, from `rope_cos_sin`.
      key_cache, value_cache: `[b, s, k, h]` and `[b, s, k, hv]`, not a ring.
      positions: `[b]` int, slot of the first new token of each sequence, and its place
        among the keys; may be traced. A number counts for all.
      new_lengths: `[b]` int, how many of the t tokens count. Default t.
      sinks: `[n]`, see `attention`.
      gated: whether `query` has output gates.
      norm_rope: how heads are normalised and rotated, see `qk_norm_rope_cache`.
      scale: of the scores, a number, default h ** -0.5.
      window: a query sees so many keys, the last its own; at least 1.
      softcap: of the scores, see `attention`.

    Returns:
      out: `[b, t, n, hv]`, dtype of query.
      key_cache, value_cache: in their dtypes.

    Raises:
      TypeError: shapes or dtypes that do not fit.
      ValueError: heads of `query` that are not h dims, with gates h + hv; as
        `qk_norm_rope_cache` and `attention`.

    Example:
      >>> query, new = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 1, 4))  # one token
      >>> tables = jaxkern.rope_cos_sin(jnp.array([2]), 4)
      >>> caches = jnp.zeros((1, 3, 1, 4)), jnp.zeros((1, 3, 1, 4))
      >>> out, keys, values = jaxkern.qk_norm_rope_cache_attention(
      ...     query, new, new, (None, None), tables, *caches, jnp.array([2])
      ... )
      >>> out[0, 0, 0]  # of three values, two are zeros
      Array([0.787, 0.787, 0.787, 0.787], dtype=float32)
    """
    turn, options = as_operands(OP, key, norm_weights, tables, norm_rope)
    t, s = ((*jnp.shape(x), 1, 1)[1] for x in (query, key_cache))
    starts = per_sequence(OP, "positions", positions, query.shape[:1])
    _, window, _ = checked_visibility(OP, True, window, softcap, starts, starts, t, s)
    return qk_norm_rope_cache_attention_p(
        *(query, key, value, *turn),
        *(key_cache, value_cache, starts, new_lengths, sinks),
        gated=gated,
        scale=max(key.shape[-1], 1) ** -0.5 if scale is None else float(scale),
        window=window,
        softcap=softcap,
        **options,
    )


def check_query(width: int, h: int, hv: int, gated: bool) -> None:
    expected = h + hv if gated else h
    if width != expected:
        gates = f" and gates of {hv}" if gated else ""
        raise ValueError(
            f"{OP}: heads of `query` have {width} dims where keys of {h}{gates} ask "
            f"for {expected}."
        )


class ProjectedTokens(NamedTuple):
    """`NewTokens` whose queries may have their output gates behind them."""

    query: Float[Array, "b t k*g q"]
    key: Float[Array, "b t k h"]
    value: Float[Array, "b t k hv"]
    query_weight: Float[Array, " h"] | None
    key_weight: Float[Array, " h"] | None
    cos: Float[Array, "b t r"]
    sin: Float[Array, "b t r"]


def qk_norm_rope_cache_attention_reference(
    new: ProjectedTokens,
    key_cache: Float[Array, "b s k h"],
    value_cache: Float[Array, "b s k hv"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None,
    sinks: Float[Array, " k*g"] | None,
    *,
    gated: bool,
    eps: float | None,
    value_eps: float | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    **rotation: Unpack[NormedRotation],
) -> tuple[
    Float[Array, "b t k*g hv"], Float[Array, "b s k h"], Float[Array, "b s k hv"]
]:
    h = new.key.shape[-1]
    check_query(new.query.shape[-1], h, new.value.shape[-1], gated)
    query, gate = heads_and_gates(new.query, h, gated)
    query, key = turned(OP, NewTokens(query, *new[1:]), eps=eps, **rotation)
    slots = positions, new_lengths
    keys = update_kv_cache_reference(key_cache, key, *slots, ring=False)
    value = normed_value(new.value, value_eps)
    values = update_kv_cache_reference(value_cache, value, *slots, ring=False)
    attended = visible_operands(query, keys, values, positions, new_lengths, sinks)
    out, _ = attention_reference(
        attended, scale=scale, causal=True, window=window, softcap=softcap
    )
    return out if gate is None else sigmoid_gate_reference(out, gate), keys, values


def heads_and_gates(
    query: Float[Array, "b t n q"], h: int, gated: bool
) -> tuple[Float[Array, "b t n h"], Float[Array, "b t n hv"] | None]:
    """What is behind h dims of a head is its gate."""
    return (query[..., :h], query[..., h:]) if gated else (query, None)


def visible_operands(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    new_lengths: jax.Array | None,
    sinks: jax.Array | None,
) -> AttentionOperands:
    """What `attention` reads once the cache has the new tokens.

    More of them than t count as t, and fewer than 0 as 0. Positions behind the cache
    are as good as its end, and their sums do not wrap.
    """
    t, s = query.shape[1], keys.shape[1]
    grown = t if new_lengths is None else jnp.clip(new_lengths, 0, t)
    lengths = jnp.minimum(positions, s) + grown
    return AttentionOperands(
        query, keys, values, None, None, None, None, lengths, positions, sinks
    )


# as `qk_norm_rope_cache`; each row is a softmax over all of s
qk_norm_rope_cache_attention_p = kernel_primitive(
    qk_norm_rope_cache_attention_reference,
    replicated=("g", "q", "h", "hv", "r", "t", "s"),
)
