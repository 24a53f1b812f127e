"""Llama and its relatives as pure functions: one page, a switch for each difference.

    x = embedding(tokens)
    for each layer:
        x = x + attention(rms_norm(x))          https://arxiv.org/abs/2302.13971
        x = x + swiglu(rms_norm(x))
    logits = rms_norm(x) @ output

Qwen2 adds biases to q, k and v, Qwen3 normalises the heads of q and k, Mistral sees a
window of the last keys, in SmolLM3 some layers do not rotate. OLMo 2 and 3 normalise
what a layer adds and not what it reads, and q and k over their whole width. Gemma 2 and
3 normalise both, gate with gelu, scale the embeddings, and have windows in some layers,
which may rotate by another base. Any may have more biases, another scale of the scores,
and soft caps on scores and logits. `prefill` reads the prompts, `decode` adds one token
to each sequence; both take and return the key/value cache.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxkern import (
    KVCache,
    apply_rope,
    empty_kv_cache,
    qkv_rope,
    rms_norm,
    rms_norm_add,
    rope_cos_sin,
    softcap,
)
from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.cached_steps import (
    attend,
    attend_in_one,
    decode,
    next_positions,
    prefill,
    text_lengths,
)
from jaxkern.models.products import (
    Activation,
    Matrices,
    Table,
    embed,
    gated,
    output_product,
    plus,
    project,
    summed_over,
)
from jaxkern.models.remat import Remat, rematerialised
from jaxkern.models.traced_once import traced_once
from jaxkern.primitives.rope.rope import Pairing
from jaxkern.primitives.rope.rope_frequencies import RopeScaling

__all__ = [
    "Layer",
    "LlamaConfig",
    "LlamaWeights",
    "decode",
    "empty_cache",
    "hidden_states",
    "logits",
    "prefill",
]


@dataclass(frozen=True)
class Rotation:
    """How heads rotate: base and scaling of the frequencies."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class LlamaConfig:
    """What the weights do not say by their shapes; hashable, so static under `jit`."""

    architecture: str
    context: int  # longest text the model was trained for, in tokens
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float  # of every norm
    rotary_dim: int
    theta: float
    pairing: Pairing
    scaling: RopeScaling | None = None
    window: int | None = None
    attention_scale: float | None = None  # of the scores; None: head_dim**-0.5
    attention_softcap: float | None = None  # of the scores, as in Gemma 2
    logit_softcap: float | None = None
    dtype: str = "float32"  # of activations
    product_dtype: str | None = None  # to which quantised products round them: "int8";
    # "float8_e4m3fn": both operands of plain products, when training
    fused: bool = False  # also plain weights and caches by ops that have GPU kernels
    windowed: tuple[bool, ...] | None = None  # layers with the window; None: all
    local: Rotation | None = None  # of layers with the window, where it is another
    rotated: tuple[bool, ...] | None = None  # layers that rotate; None: all
    activation: Activation = "silu"
    embedding_scale: float | None = None
    summed_over: str | None = None  # mesh axis that cuts heads and hidden dims


class Layer(NamedTuple):
    """Weights of one layer; None for what the architecture does not have."""

    attention_norm: Float[Array, " d"] | None
    qkv: Matrices
    qkv_bias: Float[Array, " (k*g+2*k)*h"] | None
    q_norm: Float[Array, " h"] | Float[Array, " k*g*h"] | None
    k_norm: Float[Array, " h"] | Float[Array, " k*h"] | None
    attention_output: Matrices
    ffn_norm: Float[Array, " d"] | None
    gate_up: Matrices
    down: Matrices
    attention_output_bias: Float[Array, " d"] | None = None
    gate_up_bias: Float[Array, " 2*f"] | None = None
    down_bias: Float[Array, " d"] | None = None
    attention_post_norm: Float[Array, " d"] | None = None
    ffn_post_norm: Float[Array, " d"] | None = None


class LlamaWeights(NamedTuple):
    """Weights of a model."""

    embedding: Table
    layers: tuple[Layer, ...]
    output_norm: Float[Array, " d"]
    output: Matrices  # to logits
    rope_factors: Float[Array, " r"] | None


Caches = tuple[KVCache, ...]
"""One cache for each layer; all have read the same number of tokens."""

Tables = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]
"""cos and sin of the new tokens."""


def empty_cache(
    config: LlamaConfig, batch: int, slots: int, dtype: CacheForm = jnp.float32
) -> Caches:
    """Caches for `batch` sequences of up to `slots` tokens.

    They take 2 * layers * batch * slots * kv_heads * head_dim * itemsize bytes. `dtype`
    may be a codec: then codes and scales are kept.
    """
    sizes = (batch, slots, config.kv_heads, config.head_dim)
    return tuple(empty_kv_cache(*sizes, dtype=dtype) for _ in range(config.layers))


def logits(
    config: LlamaConfig, weights: LlamaWeights, x: Float[Array, "... d"]
) -> Float[Array, "... v"]:
    """Of the token that follows each hidden state, in float32."""
    return softcap(output_product(config, x, weights.output), config.logit_softcap)


def hidden_states(
    config: LlamaConfig,
    weights: LlamaWeights,
    tokens: Int32[Array, "b t"],
    cache: Caches | None = None,
    new_lengths: Int[Array, " b"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
    remat: Remat = "none",
) -> tuple[Float[Array, "b t d"], Caches | None]:
    """Normalised outputs of the last layer; the cache with what counts of the tokens.

    `new_lengths` says how many of the t tokens do, default all. Without a cache it is
    the forward pass of training; a row may hold several texts, one id for each, and
    `remat` says what is kept for the gradient.
    """
    positions = next_positions(tokens, cache, segment_ids)  # [b, t]
    lengths = None if cache is None else text_lengths(tokens, cache, new_lengths)

    def tables(rotation: Rotation) -> Tables:
        found = rope_cos_sin(
            positions,
            config.rotary_dim,
            theta=rotation.theta,
            scaling=rotation.scaling,
            frequency_factors=weights.rope_factors,
            length=lengths,
        )
        return lax.optimization_barrier(found)  # else computed in every layer

    far = near = tables(Rotation(config.theta, config.scaling))
    if config.local is not None:
        near = tables(config.local)
    x = embed(tokens, weights.embedding, jnp.dtype(config.dtype))
    if config.embedding_scale is not None:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)

    @functools.cache
    def layer_with(window: int | None) -> Callable:
        one = partial(transformer_layer, config, window=window)
        return rematerialised(one, remat) if cache is None else traced_once(one)

    after = []
    for i, layer in enumerate(weights.layers):
        own = None
        if cache is not None:  # lengths are the same for all layers: derived from once
            own = replace(cache[i], lengths=cache[0].lengths)
        local = config.windowed is None or config.windowed[i]
        rotates = config.rotated is None or config.rotated[i]
        x, own = layer_with(config.window if local else None)(
            layer,
            x,
            (near if local else far) if rotates else None,
            own,
            new_lengths,
            segment_ids,
        )
        after.append(own)
    x = rms_norm(x, weights.output_norm, eps=config.eps)
    return x, None if cache is None else tuple(after)


def transformer_layer(
    config: LlamaConfig,
    layer: Layer,
    x: Float[Array, "b t d"],
    tables: Tables | None,
    cache: KVCache | None,
    new_lengths: Int[Array, " b"] | None,
    segment_ids: Int[Array, "b t"] | None,
    *,
    window: int | None,
) -> tuple[Float[Array, "b t d"], KVCache | None]:
    """Attention, then the feed-forward block, each added to x; and the cache."""
    x, after = attention_layer(
        config, layer, x, tables, cache, new_lengths, segment_ids, window=window
    )
    bias, activation = layer.gate_up_bias, config.activation
    reads, norm, x, _ = Branch.begin(config, x, layer.ffn_norm, cache)
    y = gated(config, reads, layer.gate_up, norm, bias, activation)
    y = added(config, x, y, layer.down, layer.down_bias, layer.ffn_post_norm)
    return y, after


def attention_layer(
    config: LlamaConfig,
    layer: Layer,
    x: Float[Array, "b t d"],
    tables: Tables | None,
    cache: KVCache | None,
    new_lengths: Int[Array, " b"] | None,
    segment_ids: Int[Array, "b t"] | None,
    *,
    window: int | None,
) -> tuple[Float[Array, "b t d"], KVCache | None]:
    """x + attention of the new tokens over the cache, and the cache with their keys."""
    b, t, _ = x.shape
    heads = partial(heads_of, config)
    reads, norm, x, _ = Branch.begin(config, x, layer.attention_norm, cache)
    qkv = plus(project(config, reads, layer.qkv, norm), layer.qkv_bias)
    k_end = (config.heads + config.kv_heads) * config.head_dim
    q, k, v = jnp.split(qkv, (config.heads * config.head_dim, k_end), axis=-1)
    options: dict = dict(
        window=window,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
    )
    if fits_one_op(config, layer, tables, cache):
        assert tables is not None and cache is not None
        norms = layer.q_norm, layer.k_norm
        q, k, v = heads(q), heads(k), heads(v)
        y, after = attend_in_one(
            q,
            k,
            v,
            norms,
            tables,
            cache,
            new_lengths,
            eps=config.eps,
            pairing=config.pairing,
            **options,
        )
    elif in_one_pass(layer, tables, cache):
        assert tables is not None
        q, k, v = qkv_rope(
            heads(qkv), *tables, kv_heads=config.kv_heads, pairing=config.pairing
        )
        y, after = attend(q, k, v, cache, new_lengths, segment_ids, **options)
    else:
        q, k, v = heads(q, layer.q_norm), heads(k, layer.k_norm), heads(v)
        if tables is not None:
            q, k = (apply_rope(a, *tables, pairing=config.pairing) for a in (q, k))
        y, after = attend(q, k, v, cache, new_lengths, segment_ids, **options)
    post, bias = layer.attention_post_norm, layer.attention_output_bias
    y = y.reshape(b, t, -1)
    return added(config, x, y, layer.attention_output, bias, post), after


def heads_of(
    config: LlamaConfig,
    y: Float[Array, "b t n*h"],
    norm: Float[Array, " h"] | Float[Array, " n*h"] | None = None,
) -> Float[Array, "b t n h"]:
    """The heads of a product; `norm` is of each of them, or one over all."""
    if norm is not None and norm.size != config.head_dim:
        y, norm = rms_norm(y, norm, eps=config.eps), None
    y = y.reshape(*y.shape[:2], -1, config.head_dim)
    return y if norm is None else rms_norm(y, norm, eps=config.eps)


def in_one_pass(layer: Layer, tables: Tables | None, cache: KVCache | None) -> bool:
    """Whether q, k and v leave their one product as they are rotated: in training."""
    bare = layer.q_norm is None and layer.k_norm is None
    return cache is None and tables is not None and bare and len(layer.qkv) == 1


def fits_one_op(
    config: LlamaConfig, layer: Layer, tables: Tables | None, cache: KVCache | None
) -> bool:
    """Whether `attend_in_one` does what this layer does, and has a kernel for it."""
    if not config.fused or tables is None or cache is None or cache.ring:
        return False
    return layer.q_norm is None or layer.q_norm.shape == (config.head_dim,)


def added(
    config: LlamaConfig,
    x: Float[Array, "b t d"],
    y: Float[Array, "b t f"],
    matrices: Matrices,
    bias: Float[Array, " d"] | None,
    post_norm: Float[Array, " d"] | None,
) -> Float[Array, "b t d"]:
    """x + y times the matrices; with a post-norm x + rms_norm of that product.

    With `summed_over` a device has a part of y and of the product's sum.
    """
    if config.summed_over is not None:
        total = partial(summed_over, config.summed_over, config, y, matrices)
        if post_norm is None:
            return total(plus(x, bias))
        y = plus(total(), bias).astype(x.dtype)
        return rms_norm_add(y, x, post_norm, eps=config.eps)
    if post_norm is None:
        return project(config, y, matrices, residual=plus(x, bias))
    y = plus(project(config, y, matrices), bias)
    return rms_norm_add(y, x, post_norm, eps=config.eps)
