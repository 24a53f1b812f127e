"""Decoders whose layers differ: each has a mixer of tokens and a feed-forward block.

    x = embedding(tokens) * embedding_scale
    for each layer:
        x = x + residual_scale * mixer(rms_norm(x))
        x = x + residual_scale * feed_forward(rms_norm(x))
    logits = rms_norm(x) @ output * logit_scale

A mixer (mixers/) is attention, latent attention, a gated delta net, Kimi delta
attention, a short convolution, Mamba-2, or attention beside Mamba-2, and has its own
kind of state; a feed-forward block is dense or a mixture of experts (feed_forward.py).
A layer may lack one of the two. An architecture's entry says which where. `prefill`
reads the prompts, `decode` adds one token to each sequence; both take and return the
states. Without them `hidden_states` is the forward of training.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxkern import KVCache, rms_norm
from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.cached_steps import decode, next_positions, prefill
from jaxkern.models.feed_forward import Dense, DenseWeights, Mixture, MixtureWeights
from jaxkern.models.mixers.delta_net import DeltaNet, DeltaNetWeights
from jaxkern.models.mixers.full_attention import AttentionWeights, FullAttention
from jaxkern.models.mixers.kimi_delta import KimiDelta, KimiDeltaWeights
from jaxkern.models.mixers.latent import LatentAttention, LatentCache, LatentWeights
from jaxkern.models.mixers.mamba2 import Mamba2, Mamba2Weights
from jaxkern.models.mixers.mixing import Mixing, rotation_tables
from jaxkern.models.mixers.parallel import Parallel, ParallelState, ParallelWeights
from jaxkern.models.mixers.recurrent_state import (
    DraftedState,
    RecurrentState,
    TokenCount,
    grown,
)
from jaxkern.models.mixers.short_conv import ShortConv, ShortConvWeights
from jaxkern.models.products import Matrices, Table, embed, output_product
from jaxkern.models.traced_once import traced_once

__all__ = [
    "DecoderConfig",
    "DecoderWeights",
    "LayerWeights",
    "decode",
    "empty_cache",
    "hidden_states",
    "logits",
    "prefill",
]

Mixer = (
    FullAttention
    | LatentAttention
    | DeltaNet
    | KimiDelta
    | ShortConv
    | Mamba2
    | Parallel
)
FeedForward = Dense | Mixture
State = (
    KVCache | LatentCache | RecurrentState | DraftedState | ParallelState | TokenCount
)
States = tuple[State, ...]
"""One of each layer's own kind; all have read the same number of tokens."""


@dataclass(frozen=True)
class DecoderConfig:
    """What the weights do not say by their shapes; hashable, so static under `jit`."""

    architecture: str
    context: int  # longest text the model was trained for, in tokens
    d_model: int
    vocabulary: int
    eps: float  # of every norm
    mixers: tuple[Mixer | None, ...]  # of each layer, None where it has none
    feed_forwards: tuple[FeedForward | None, ...]
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    dtype: str = "float32"  # of activations
    product_dtype: str | None = None  # to which quantised products round them: "int8"
    fused: bool = False  # products that take in the norm before them
    expert_dtype: str | None = None  # of products of experts kept in it, many tokens'

    @property
    def layers(self) -> int:
        return len(self.mixers)


class LayerWeights(NamedTuple):
    """Weights of one layer, None for a block that it does not have."""

    mixer_norm: Float[Array, " d"] | None
    mixer: (
        AttentionWeights
        | LatentWeights
        | DeltaNetWeights
        | KimiDeltaWeights
        | ShortConvWeights
        | Mamba2Weights
        | ParallelWeights
        | None
    )
    feed_forward_norm: Float[Array, " d"] | None
    feed_forward: DenseWeights | MixtureWeights | None


class DecoderWeights(NamedTuple):
    """Weights of a model."""

    embedding: Table
    layers: tuple[LayerWeights, ...]
    output_norm: Float[Array, " d"]
    output: Matrices  # to logits


class TextWeights(Protocol):
    """Those of `DecoderWeights` behind the embedding, maybe among others."""

    @property
    def layers(self) -> tuple[LayerWeights, ...]: ...
    @property
    def output_norm(self) -> Float[Array, " d"]: ...


def empty_cache(
    config: DecoderConfig, batch: int, slots: int, dtype: CacheForm = jnp.float32
) -> States:
    """States of `batch` sequences, of up to `slots` tokens where they grow with them.

    Recurrent states are float32, whatever `dtype` is; a codec is for keys and values.

    Raises:
      ValueError: a codec, and latents are to be kept.
    """
    return tuple(
        TokenCount(jnp.zeros(batch, jnp.int32))
        if mixer is None
        else mixer.empty_state(batch, slots, dtype)
        for mixer in config.mixers
    )


def logits(
    config: DecoderConfig, weights: DecoderWeights, x: Float[Array, "... d"]
) -> Float[Array, "... v"]:
    """Of the token that follows each hidden state, in float32."""
    y = output_product(config, x, weights.output)
    return y if config.logit_scale == 1.0 else y * config.logit_scale


def check_reading(cache: States | None, new_lengths: Any, segment_ids: Any) -> None:
    """Whole texts may be packed; what goes into a cache may end in each row apart."""
    if (new_lengths if cache is None else segment_ids) is not None:
        raise ValueError(
            "hidden_states: `new_lengths` goes with a cache and `segment_ids` without "
            "one. Pack whole texts, or read texts into a cache row by row."
        )


def hidden_states(
    config: DecoderConfig,
    weights: DecoderWeights,
    tokens: Int32[Array, "b t"],
    cache: States | None = None,
    new_lengths: Int[Array, " b"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t d"], States | None]:
    """Normalised outputs of the last layer; the states with what counts of the tokens.

    Args:
      cache: None for whole texts, as in training.
      new_lengths: how many of the t tokens count, default all; with a cache.
      segment_ids: equal for the tokens of one text, of texts that are packed in a row;
        without a cache.
    """
    check_reading(cache, new_lengths, segment_ids)
    rotations = {
        mixer.rotation
        for mixer in config.mixers
        if isinstance(mixer, FullAttention | LatentAttention | Parallel)
        and mixer.rotation
    }
    positions = next_positions(tokens, cache, segment_ids)
    tables = rotation_tables(rotations, positions)
    at = Mixing(new_lengths, segment_ids, tables, positions)
    x = embed(tokens, weights.embedding, jnp.dtype(config.dtype))
    x = x * jnp.asarray(config.embedding_scale, x.dtype)
    return through_layers(config, weights, x, cache, at)


def through_layers(
    config: DecoderConfig,
    weights: TextWeights,
    x: Float[Array, "b t d"],
    cache: States | None,
    at: Mixing,
    behind: Sequence[Float[Array, "b t d"]] = (),
) -> tuple[Float[Array, "b t d"], States | None]:
    """`hidden_states` of what is embedded; `behind[i]` is added behind layer i."""

    rotations = tuple(at.tables)

    def begin(x: Float[Array, "b t d"], norm: Float[Array, " d"] | None, state: Any):
        return Branch.begin(config, x, norm, state, config.residual_scale)

    @functools.cache
    def block_of(mixer: Mixer | None, feed_forward: Any) -> Callable:
        def block(layer: LayerWeights, x: Array, state: Any, at: Mixing, tables: Any):
            at = at._replace(tables=dict(zip(rotations, tables, strict=True)))
            if mixer is not None:
                branch = begin(x, layer.mixer_norm, state)
                x, state = mixer(config, cast(Any, layer.mixer), branch, state, at)
            elif state is not None:
                state = replace(state, lengths=grown(state, x, at))
            if feed_forward is not None:
                branch = begin(x, layer.feed_forward_norm, state)
                x = feed_forward(config, cast(Any, layer.feed_forward), branch)
            return x, state

        return block if cache is None else traced_once(block)

    after: list[Any] = []
    blocks = zip(config.mixers, config.feed_forwards, weights.layers, strict=True)
    for i, (mixer, feed_forward, layer) in enumerate(blocks):
        state: Any = None
        if cache is not None:  # lengths are the same for all: derived from once
            state = replace(cache[i], lengths=cache[0].lengths)
        places = at._replace(tables={}), tuple(at.tables.values())
        x, state = block_of(mixer, feed_forward)(layer, x, state, *places)
        after.append(state)
        x = x + behind[i].astype(x.dtype) if i < len(behind) else x
    x = rms_norm(x, weights.output_norm, eps=config.eps)
    return x, None if cache is None else tuple(after)
