"""Gemma 4, the text model, as pure functions.

    x = embedding(tokens) * sqrt(d)
    e = (rms_norm(x @ context / sqrt(d)) + table(tokens) * sqrt(p)) / sqrt(2)
    for each layer i:
        x = x + rms_norm(attention(rms_norm(x)))
        x = x + rms_norm(geglu(rms_norm(x)))
        x = (x + rms_norm((gelu(x @ gate) * e_i) @ projection)) * scalar     e_i: [p]
    logits = softcap(rms_norm(x) @ output)

Layers see a window, or every key: then heads are wider, a part of their pairs rotates,
and values may be the keys before norm and rotation. Values are normalised, and scores
are not scaled. The last layers have no keys of their own: they read those of the last
layer of their kind that has. Smaller models have the inputs of width p for each layer;
larger ones have not, and may have experts beside each dense block
(`gemma4_experts.py`). Formulas: transformers' `modeling_gemma4.py`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxkern import (
    KVCache,
    append_kv_cache,
    apply_rope,
    empty_kv_cache,
    head_norm_rope,
    rms_norm,
    rms_norm_add,
    rope_cos_sin,
    softcap,
)
from jaxkern.models.architecture import CacheForm
from jaxkern.models.cached_steps import (
    attend_in_one,
    decode,
    next_positions,
    prefill,
    with_lengths,
)
from jaxkern.models.gemma4_experts import Gemma4Experts, beside
from jaxkern.models.products import (
    Matrices,
    Table,
    embed,
    gate_of,
    gated,
    output_product,
    project,
)
from jaxkern.primitives.attention.cached_attention import attention_over

__all__ = [
    "Gemma4Config",
    "Gemma4Layer",
    "Gemma4Weights",
    "decode",
    "empty_cache",
    "hidden_states",
    "logits",
    "prefill",
]


@dataclass(frozen=True)
class Heads:
    """Of the layers with a window, or of the others."""

    kv_heads: int
    head_dim: int
    theta: float
    rotated_pairs: int  # the first of a head's
    keys_as_values: bool = False


@dataclass(frozen=True)
class Gemma4Config:
    """What the weights do not say by their shapes; hashable, so static under `jit`."""

    architecture: str
    context: int  # longest text the model was trained for, in tokens
    layers: int
    d_model: int
    heads: int
    vocabulary: int
    eps: float  # of every norm
    window: int
    windowed: tuple[bool, ...]  # which layers see the window
    near: Heads  # of those
    far: Heads  # of the others
    shared: int  # layers at the end without keys of their own
    per_layer: int  # width of what each layer gets of the tokens, or 0
    logit_softcap: float | None = None
    experts: int = 0
    chosen: int = 0  # of the experts, for each token
    expert_width: int = 0
    dtype: str = "float32"  # of activations
    product_dtype: str | None = None  # to which quantised products round them: "int8"
    fused: bool = False  # also plain weights by ops that have GPU kernels

    def heads_of(self, layer: int) -> Heads:
        return self.near if self.windowed[layer] else self.far

    def keys_of(self, layer: int) -> int:
        """The layer whose keys this one reads."""
        own = self.layers - self.shared
        if layer < own:
            return layer
        kind = self.windowed[layer]
        return max(i for i in range(own) if self.windowed[i] == kind)


class Gemma4Layer(NamedTuple):
    """Weights of one layer; None for what it does not have."""

    attention_norm: Float[Array, " d"]
    qkv: Matrices  # q, k and v; q and k where keys are values; or q
    q_norm: Float[Array, " h"]
    k_norm: Float[Array, " h"] | None
    attention_output: Matrices
    attention_post_norm: Float[Array, " d"]
    ffn_norm: Float[Array, " d"]
    gate_up: Matrices
    down: Matrices
    ffn_post_norm: Float[Array, " d"]
    input_gate: Matrices | None
    input_projection: Matrices | None
    input_post_norm: Float[Array, " d"] | None
    scalar: Float[Array, "1"]
    experts: Gemma4Experts | None = None


class Gemma4Weights(NamedTuple):
    """Weights of a model; the three of the inputs of layers are None without these."""

    embedding: Table
    layers: tuple[Gemma4Layer, ...]
    output_norm: Float[Array, " d"]
    output: Matrices
    input_table: Table | None
    input_context: Matrices | None
    input_norm: Float[Array, " p"] | None


Caches = tuple[KVCache, ...]
"""One for each layer that has keys of its own."""


def empty_cache(
    config: Gemma4Config, batch: int, slots: int, dtype: CacheForm = jnp.float32
) -> Caches:
    """Caches for `batch` sequences of up to `slots` tokens; `dtype` may be a codec."""
    heads = [config.heads_of(i) for i in range(config.layers - config.shared)]
    return tuple(
        empty_kv_cache(batch, slots, h.kv_heads, h.head_dim, dtype=dtype) for h in heads
    )


def logits(
    config: Gemma4Config, weights: Gemma4Weights, x: Float[Array, "... d"]
) -> Float[Array, "... v"]:
    """Of the token that follows each hidden state, in float32."""
    return softcap(output_product(config, x, weights.output), config.logit_softcap)


def hidden_states(
    config: Gemma4Config,
    weights: Gemma4Weights,
    tokens: Int32[Array, "b t"],
    cache: Caches | None = None,
    new_lengths: Int[Array, " b"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t d"], Caches | None]:
    """Normalised outputs of the last layer; the cache with what counts of the tokens.

    `new_lengths` says how many of the t tokens do, default all. Without a cache it is
    the forward pass of training; a row may hold several texts, one id for each.
    """
    positions = next_positions(tokens, cache, segment_ids)  # [b, t]
    before = None if cache is None else with_lengths(cache, cache[0].lengths)
    tables = [rotation(positions, heads) for heads in (config.far, config.near)]
    x = embed(tokens, weights.embedding, jnp.dtype(config.dtype))
    x = x * jnp.asarray(config.d_model**0.5, x.dtype)
    inputs = layer_inputs(config, weights, tokens, x)
    seen: list[dict[str, Any]] = []  # keys and values of the layers that have some
    after: list[KVCache] = []
    for i, layer in enumerate(weights.layers):
        heads, table = config.heads_of(i), tables[config.windowed[i]]
        y = project(config, x, layer.qkv, layer.attention_norm)
        width = config.heads * heads.head_dim
        q, kv = heads_in(heads, y[..., :width]), heads_in(heads, y[..., width:])
        options: dict = dict(
            window=config.window if config.windowed[i] else None, scale=1.0
        )
        cache = None if before is None or config.keys_of(i) != i else before[i]
        if cache is not None and config.fused:
            y, own = attend_in_one(
                q,
                *keys_and_values(heads, kv),
                (layer.q_norm, layer.k_norm),
                table,
                cache,
                new_lengths,
                eps=config.eps,
                value_eps=config.eps,
                pairing="neox",
                **options,
            )
            after.append(own)
            seen.append(cached_operands(cache, own))
        else:
            if config.keys_of(i) == i:
                k, v = normed_keys_and_values(config, layer, heads, kv)
                k = apply_rope(k, *table)
                if cache is None:
                    seen.append(dict(key=k, value=v, segment_ids=segment_ids))
                else:
                    after.append(append_kv_cache(cache, k, v, new_lengths))
                    seen.append(cached_operands(cache, after[-1]))
            y = attention_over(
                turned_q(config, layer, q, table, in_one=before is not None),
                **seen[config.keys_of(i)],
                causal=True,
                **options,
            )
        y = project(config, y.reshape(*x.shape[:-1], -1), layer.attention_output)
        x = rms_norm_add(y, x, layer.attention_post_norm, eps=config.eps)
        own_input = None if inputs is None else inputs[..., i, :]
        x = after_attention(config, layer, x, own_input)
    x = rms_norm(x, weights.output_norm, eps=config.eps)
    return x, None if before is None else tuple(after)


def rotation(
    positions: Int32[Array, "b t"], heads: Heads
) -> tuple[Float[Array, "b t r"], Float[Array, "b t r"]]:
    """cos and sin; pairs that do not rotate have a frequency of 0."""
    pairs = jnp.arange(heads.head_dim // 2)
    found = rope_cos_sin(
        positions,
        heads.head_dim,
        theta=heads.theta,
        frequency_factors=jnp.where(pairs < heads.rotated_pairs, 1.0, jnp.inf),
    )
    return lax.optimization_barrier(found)  # else computed in every layer


def layer_inputs(
    config: Gemma4Config,
    weights: Gemma4Weights,
    tokens: Int32[Array, "b t"],
    x: Float[Array, "b t d"],
) -> Float[Array, "b t l p"] | None:
    """What each layer gets of the tokens and their embeddings x."""
    if weights.input_table is None or weights.input_context is None:
        return None
    own = embed(tokens, weights.input_table, x.dtype)
    own = own * jnp.asarray(config.per_layer**0.5, x.dtype)
    context = project(config, x, weights.input_context)
    own, context = (
        a.reshape(*a.shape[:-1], -1, config.per_layer) for a in (own, context)
    )
    # the norm of context / sqrt(d)
    eps = config.eps * config.d_model
    return rms_norm_add(context, own, weights.input_norm, 2**-0.5, eps=eps)


def heads_in(heads: Heads, y: Float[Array, "b t f"]) -> Float[Array, "b t n h"]:
    return y.reshape(*y.shape[:-1], -1, heads.head_dim)


def turned_q(
    config: Gemma4Config,
    layer: Gemma4Layer,
    q: Float[Array, "b t n h"],
    table: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    *,
    in_one: bool,
) -> Float[Array, "b t n h"]:
    """Queries normalised and rotated: in one op where that has no gradient to give."""
    if in_one and config.fused:
        return head_norm_rope(q, layer.q_norm, *table, eps=config.eps)
    return apply_rope(rms_norm(q, layer.q_norm, eps=config.eps), *table)


def keys_and_values(
    heads: Heads, kv: Float[Array, "b t n h"]
) -> tuple[Float[Array, "b t k h"], Float[Array, "b t k h"]]:
    """As they are projected."""
    k = kv[..., : heads.kv_heads, :]
    return k, k if heads.keys_as_values else kv[..., heads.kv_heads :, :]


def normed_keys_and_values(
    config: Gemma4Config,
    layer: Gemma4Layer,
    heads: Heads,
    kv: Float[Array, "b t n h"],
) -> tuple[Float[Array, "b t k h"], Float[Array, "b t k h"]]:
    """Normalised; the keys do not rotate yet."""
    k, v = keys_and_values(heads, kv)
    return rms_norm(k, layer.k_norm, eps=config.eps), rms_norm(v, eps=config.eps)


def cached_operands(cache: KVCache, own: KVCache) -> dict[str, Any]:
    """What attention reads of a cache that has grown from `cache` to `own`."""
    return dict(
        key=own.keys, value=own.values, kv_lengths=own.lengths, q_offset=cache.lengths
    )


def after_attention(
    config: Gemma4Config,
    layer: Gemma4Layer,
    x: Float[Array, "b t d"],
    inputs: Float[Array, "b t p"] | None,
) -> Float[Array, "b t d"]:
    """The feed-forward block, then the layer's inputs, then its scalar."""
    y = gated(config, x, layer.gate_up, layer.ffn_norm, None, "gelu_tanh")
    y = project(config, y, layer.down)
    if layer.experts is not None:
        y = beside(layer.experts, x, y, chosen=config.chosen, eps=config.eps)
    if inputs is None or layer.input_gate is None or layer.input_projection is None:
        return rms_norm_add(y, x, layer.ffn_post_norm, layer.scalar, eps=config.eps)
    x = rms_norm_add(y, x, layer.ffn_post_norm, eps=config.eps)
    y = gate_of(config, x, layer.input_gate, inputs, "gelu_tanh")
    y = project(config, y, layer.input_projection)
    return rms_norm_add(y, x, layer.input_post_norm, layer.scalar, eps=config.eps)
