"""Llama and its relatives as pure functions: Llama, SmolLM2, Mistral, Qwen2, Qwen3.

    x = embedding(tokens)
    for each layer:
        x = x + attention(rms_norm(x))          https://arxiv.org/abs/2302.13971
        x = x + swiglu(rms_norm(x))
    logits = rms_norm(x) @ output

Qwen2 adds biases to q, k and v, Qwen3 normalises the heads of q and k, Mistral sees a
window of the last keys; any of them may have more biases, another scale of the scores,
and soft caps on scores and logits. `prefill` reads the prompts, `decode` adds one token
to each sequence; both take and return the key/value cache.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxkern import (
    InterleavedTensor,
    KVCache,
    apply_rope,
    attention,
    cached_attention,
    embedding,
    empty_kv_cache,
    linear,
    qk_norm_rope_cache,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    quantized_swiglu,
    rms_norm,
    rope_cos_sin,
    softcap,
    swiglu,
)
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor
from jaxkern.primitives.rope.rope import Pairing
from jaxkern.primitives.rope.rope_frequencies import RopeScaling


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
    product_dtype: str | None = None  # to which quantised products round them: "int8"
    fused: bool = False  # also plain weights and caches by ops that have GPU kernels


Matrix = Float[Array, "d f"] | Float[Array, "f d"] | QuantizedTensor
"""A weight: quantised as in the file, an array `[f, d]` of a narrow dtype, or one of
float32 with its longer side last.

That is how XLA:CPU multiplies a single row fastest; a square one is `[d, f]`.
"""

Matrices = tuple[Matrix, ...]
"""Weights side by side, with one input: one array, or the parts as in the file."""


class Layer(NamedTuple):
    """Weights of one layer; None for what the architecture does not have."""

    attention_norm: Float[Array, " d"]
    qkv: Matrices
    qkv_bias: Float[Array, " (k*g+2*k)*h"] | None
    q_norm: Float[Array, " h"] | None
    k_norm: Float[Array, " h"] | None
    attention_output: Matrices
    ffn_norm: Float[Array, " d"]
    gate_up: Matrices
    down: Matrices
    attention_output_bias: Float[Array, " d"] | None = None
    gate_up_bias: Float[Array, " 2*f"] | None = None
    down_bias: Float[Array, " d"] | None = None


class LlamaWeights(NamedTuple):
    """Weights of a model."""

    embedding: Float[Array, "v d"] | QuantizedTensor
    layers: tuple[Layer, ...]
    output_norm: Float[Array, " d"]
    output: Matrices  # to logits
    rope_factors: Float[Array, " r"] | None


Caches = tuple[KVCache, ...]
"""One cache for each layer; all have read the same number of tokens."""


def empty_cache(
    config: LlamaConfig, batch: int, slots: int, dtype: DTypeLike = jnp.float32
) -> Caches:
    """Caches for `batch` sequences of up to `slots` tokens.

    They take 2 * layers * batch * slots * kv_heads * head_dim * itemsize bytes.
    """
    sizes = (batch, slots, config.kv_heads, config.head_dim)
    return tuple(empty_kv_cache(*sizes, dtype=dtype) for _ in range(config.layers))


def prefill(
    config: LlamaConfig,
    weights: LlamaWeights,
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, " b"],
    cache: Caches,
) -> tuple[Float[Array, "b v"], Caches]:
    """Reads t tokens of each sequence and gives the logits of the one that follows.

    Rows may differ in length: they start at the left, and what stands behind
    `lengths[b]` has no influence. Called again it goes on where the cache ends.

    Args:
      tokens: `[b, t]`.
      lengths: `[b]`, how many of the t tokens count; at least 1.
      cache: of `empty_cache`, or returned by an earlier call. Donate it.

    Returns:
      logits: `[b, v]` float32, after the last token that counts.
      cache: with `lengths` more tokens per sequence.
    """
    x, cache = hidden_states(config, weights, tokens, cache, lengths)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)  # [b, 1, d]
    return logits(config, weights, last)[:, 0], cache


def decode(
    config: LlamaConfig,
    weights: LlamaWeights,
    tokens: Int32[Array, " b"],
    cache: Caches,
) -> tuple[Float[Array, "b v"], Caches]:
    """Adds one token to each sequence: `prefill` with t = 1.

    Returns:
      logits: `[b, v]` float32.
      cache: with one more token per sequence.
    """
    return prefill(config, weights, tokens[:, None], jnp.ones_like(tokens), cache)


def logits(
    config: LlamaConfig, weights: LlamaWeights, x: Float[Array, "... d"]
) -> Float[Array, "... v"]:
    """Of the token that follows each hidden state, in float32."""
    narrow = config.product_dtype is None and x.dtype == jnp.bfloat16
    if narrow:  # float32 of it are as exact, and cost a packed product more
        config = replace(config, product_dtype="bfloat16")
    y = project(config, x.astype(jnp.float32), weights.output)
    return softcap(y, config.logit_softcap)


def hidden_states(
    config: LlamaConfig,
    weights: LlamaWeights,
    tokens: Int32[Array, "b t"],
    cache: Caches,
    new_lengths: Int32[Array, " b"] | None = None,
) -> tuple[Float[Array, "b t d"], Caches]:
    """Normalised outputs of the last layer; the cache with what counts of the tokens.

    `new_lengths` says how many of the t tokens do, default all.
    """
    positions = cache[0].lengths[:, None] + jnp.arange(tokens.shape[1])  # [b, t]
    rotation = rope_cos_sin(
        positions,
        config.rotary_dim,
        theta=config.theta,
        scaling=config.scaling,
        frequency_factors=weights.rope_factors,
    )
    rotation = lax.optimization_barrier(rotation)  # else computed in every layer
    x = embed(tokens, weights.embedding, jnp.dtype(config.dtype))
    lengths = cache[0].lengths  # the same for all layers: derived from once
    after = []
    for layer, own in zip(weights.layers, cache, strict=True):
        own = replace(own, lengths=lengths)
        x, own = attention_layer(config, layer, x, rotation, own, new_lengths)
        after.append(own)
        y = gated(config, x, layer)
        x = project(config, y, layer.down, residual=plus(x, layer.down_bias))
    return rms_norm(x, weights.output_norm, eps=config.eps), tuple(after)


def attention_layer(
    config: LlamaConfig,
    layer: Layer,
    x: Float[Array, "b t d"],
    rotation: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    cache: KVCache,
    new_lengths: Int32[Array, " b"] | None,
) -> tuple[Float[Array, "b t d"], KVCache]:
    """x + attention of the new tokens over the cache, and the cache with their keys."""
    b, t, _ = x.shape

    def heads(y: Float[Array, "b t n*h"], norm) -> Float[Array, "b t n h"]:
        y = y.reshape(b, t, -1, config.head_dim)
        return y if norm is None else rms_norm(y, norm, eps=config.eps)

    qkv = plus(project(config, x, layer.qkv, layer.attention_norm), layer.qkv_bias)
    k_end = (config.heads + config.kv_heads) * config.head_dim
    q, k, v = jnp.split(qkv, (config.heads * config.head_dim, k_end), axis=-1)
    if config.fused and not cache.ring:
        q, k, v = (heads(a, None) for a in (q, k, v))
        y, after = cached_in_one(config, layer, q, k, v, rotation, cache, new_lengths)
        residual = plus(x, layer.attention_output_bias)
        y = y.reshape(b, t, -1)
        return project(config, y, layer.attention_output, residual=residual), after
    q, k, v = heads(q, layer.q_norm), heads(k, layer.k_norm), heads(v, None)
    q, k = (apply_rope(a, *rotation, pairing=config.pairing) for a in (q, k))
    y, after = cached_attention(
        q,
        k,
        v,
        cache,
        new_lengths,
        window=config.window,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
    )
    assert isinstance(after, KVCache)  # as it went in
    y = y.reshape(b, t, -1)
    residual = plus(x, layer.attention_output_bias)
    return project(config, y, layer.attention_output, residual=residual), after


def plus(
    x: Float[Array, "... f"], bias: Float[Array, " f"] | None
) -> Float[Array, "... f"]:
    """x + bias in x's dtype, or x where the model has none."""
    return x if bias is None else x + bias.astype(x.dtype)


def cached_in_one(
    config: LlamaConfig,
    layer: Layer,
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    rotation: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    cache: KVCache,
    new_lengths: Int32[Array, " b"] | None,
) -> tuple[Float[Array, "b t n h"], KVCache]:
    """Norms, rotation and the write to the cache by one op, then attention."""
    q, keys, values = qk_norm_rope_cache(
        q,
        k,
        v,
        layer.q_norm,
        layer.k_norm,
        *rotation,
        cache.keys,
        cache.values,
        cache.lengths,
        new_lengths,
        eps=None if layer.q_norm is None else config.eps,
        pairing=config.pairing,
    )
    grown = q.shape[1] if new_lengths is None else new_lengths
    after = replace(cache, keys=keys, values=values, lengths=cache.lengths + grown)
    y = attention(
        q,
        keys,
        values,
        kv_lengths=after.lengths,
        q_offset=cache.lengths,
        causal=True,
        window=config.window,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
    )
    assert isinstance(y, jax.Array)  # no lse was asked for
    return y, after


def project(
    config: LlamaConfig,
    x: Float[Array, "... d"],
    matrices: Matrices,
    norm: Float[Array, " d"] | None = None,
    residual: Float[Array, "... f"] | None = None,
) -> Float[Array, "... f"]:
    """x times the matrices, the results side by side.

    `norm` normalises x before, `residual` is added after: in the same kernel where the
    container of the weights has one.
    """
    options: dict = dict(compute_dtype=config.product_dtype)
    if norm is not None and not fuses(config, matrices):
        x, norm = rms_norm(x, norm, eps=config.eps), None

    def product(w: Matrix) -> Float[Array, "... f"]:
        if isinstance(w, jax.Array) and norm is None:
            across = w.dtype == jnp.float32 and w.shape[0] == x.shape[-1]
            return linear(x, w.T if across else w)
        x_now, w_now = decoded_late(x, w)
        if norm is None:
            return quantized_matmul(x_now, w_now, **options)
        return quantized_rms_norm_matmul(x_now, norm, w_now, eps=config.eps, **options)

    if residual is not None and fuses(config, matrices) and len(matrices) == 1:
        return quantized_matmul_add(*decoded_late(x, matrices[0]), residual, **options)
    ys = [product(w) for w in matrices]
    y = ys[0] if len(ys) == 1 else jnp.concatenate(ys, axis=-1)
    return y if residual is None else residual + y


def gated(
    config: LlamaConfig, x: Float[Array, "... d"], layer: Layer
) -> Float[Array, "... f"]:
    """swiglu of the normalised x times the two matrices, plus their biases."""
    gate_up, norm, bias = layer.gate_up, layer.ffn_norm, layer.gate_up_bias
    if fuses(config, gate_up) and len(gate_up) == 1 and bias is None:
        return quantized_swiglu(
            *decoded_late(x, gate_up[0]),
            norm,
            eps=config.eps,
            compute_dtype=config.product_dtype,
        )
    both = plus(project(config, x, gate_up, norm), bias)
    gate, up = jnp.split(both, 2, axis=-1)
    return swiglu(gate, up)


def fuses(config: LlamaConfig, matrices: Matrices) -> bool:
    """Whether products with them take in what stands around them."""
    return all(
        w.dtype == jnp.bfloat16 and config.fused
        if isinstance(w, jax.Array)
        else isinstance(w, InterleavedTensor)
        for w in matrices
    )


def decoded_late(x: Array, w: Matrix) -> tuple[Array, Matrix]:
    """The same, w only when x is there: XLA would hold the whole model decoded."""
    if isinstance(w, jax.Array):
        return x, w
    return lax.optimization_barrier((x, w))


def embed(
    tokens: Int32[Array, "..."],
    table: Float[Array, "v d"] | QuantizedTensor,
    dtype: DTypeLike,
) -> Float[Array, "... d"]:
    if isinstance(table, jax.Array):
        return embedding(tokens, table).astype(dtype)
    return quantized_embedding(tokens, table, dtype=dtype)
