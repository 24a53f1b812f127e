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
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxkern import (
    KVCache,
    empty_kv_cache,
    rms_norm,
    rms_norm_add,
    rope_cos_sin,
    softcap,
)
from jaxkern.models.architecture import CacheForm
from jaxkern.models.cached_steps import (
    decode,
    next_positions,
    prefill,
    with_lengths,
)
from jaxkern.models.gemma4_attention import Reading, attended
from jaxkern.models.gemma4_experts import beside
from jaxkern.models.gemma4_weights import (
    Gemma4Layer,
    Gemma4Weights,
    Heads,
)
from jaxkern.models.products import (
    embed,
    gate_of,
    gated,
    output_product,
    project,
)

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
    reading = Reading(before is not None, new_lengths, segment_ids)
    for i, layer in enumerate(weights.layers):
        own = before[i] if before is not None and config.keys_of(i) == i else None
        y = project(config, x, layer.qkv, layer.attention_norm)
        table = tables[config.windowed[i]]
        y, grown = attended(config, i, layer, y, table, own, seen, reading)
        if grown is not None:
            after.append(grown)
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
