"""Qwen3-VL: a tower for images, and the decoder of text, dense or with experts.

    features = tower(patches)               vision_tower.py
    x = embedding(tokens), or a feature where a placeholder of an image stands
    for each layer i:
        x = layer(x)                        attention and feed-forward of decoder.py
        x = x + features of level i         for the first layers, at placeholders

Each token has three positions: time, row and column. Those of text are equal; all of an
image's features have one time, and the text behind goes on past the largest of the
three. So a text with images has fewer positions than tokens, and the first cache keeps
by how many. Pairs of a head's dims take the three by turns (interleaved M-RoPE).
"""

import functools
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxkern import KVCache, mrope_cos_sin
from jaxkern.models import decoder
from jaxkern.models.architecture import CacheForm
from jaxkern.models.cached_steps import decode, next_positions, prefill
from jaxkern.models.decoder import (
    DecoderConfig,
    LayerWeights,
    States,
    logits,
    through_layers,
)
from jaxkern.models.image_rule import ImageRule
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.mixing import Mixing, Rotation
from jaxkern.models.products import Matrices, Table, embed
from jaxkern.models.vision_tower import (
    Features,
    Patches,
    VisionConfig,
    VisionWeights,
    image_features,
)

__all__ = [
    "ImageText",
    "Qwen3VLConfig",
    "Qwen3VLWeights",
    "decode",
    "empty_cache",
    "hidden_states",
    "logits",
    "prefill",
]


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(DecoderConfig):
    """That of the text, and what images need.

    Attributes:
      vision: the tower.
      rotation: of every layer of the text.
      sections: how many pairs of a head's dims turn by time, row and column.
      image_token: the placeholder of an image.
      video_token: that of a video, which is refused.
      image_rule: how an image becomes patches; None where the folder does not say.
    """

    vision: VisionConfig
    rotation: Rotation
    sections: tuple[int, int, int]
    image_token: int
    video_token: int
    image_rule: ImageRule | None = None


def seeing(text: DecoderConfig, **images: Any) -> Qwen3VLConfig:
    """The config of the text with what images need, which the text does not say."""
    of_text = {field.name: getattr(text, field.name) for field in fields(text)}
    return Qwen3VLConfig(**of_text, rotation=rotation_of(text), **images)


def rotation_of(text: DecoderConfig) -> Rotation:
    """That of every layer."""
    first = text.mixers[0]
    assert isinstance(first, FullAttention) and first.rotation is not None
    return first.rotation


class Qwen3VLWeights(NamedTuple):
    """`DecoderWeights`, and those of the tower."""

    embedding: Table
    layers: tuple[LayerWeights, ...]
    output_norm: Float[Array, " d"]
    output: Matrices  # to logits
    vision: VisionWeights


class ImageText(NamedTuple):
    """Where images are in b texts of t tokens; `image_prompts.with_images` makes it.

    Attributes:
      seen: the patches of the images, or what the tower saw of them.
      feature: `[b, t]` int32, which of its text's features a token stands for, or -1.
      positions: `[b, t, 3]` int32, time, row and column of each token.
    """

    seen: Patches | Features
    feature: Int32[Array, "b t"]
    positions: Int32[Array, "b t 3"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "lengths", "spared"],
    meta_fields=["ring"],
)
@dataclass(frozen=True)
class PlacedCache(KVCache):
    """Of the first layer.

    Attributes:
      spared: `[b]` int32, how many fewer positions than tokens the texts have.
    """

    spared: Any = None

    @classmethod
    def of(cls, cache: KVCache, spared: Int32[Array, " b"]) -> "PlacedCache":
        return cls(cache.keys, cache.values, cache.lengths, cache.ring, spared)


def empty_cache(
    config: Qwen3VLConfig, batch: int, slots: int, dtype: CacheForm = jnp.float32
) -> States:
    """Caches of `batch` sequences of up to `slots` tokens; a feature is one too."""
    first, *others = decoder.empty_cache(config, batch, slots, dtype)
    assert isinstance(first, KVCache)  # every layer has attention
    return PlacedCache.of(first, jnp.zeros(batch, jnp.int32)), *others


def hidden_states(
    config: Qwen3VLConfig,
    weights: Qwen3VLWeights,
    tokens: Int32[Array, "b t"],
    cache: States | None = None,
    new_lengths: Int[Array, " b"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
    images: ImageText | None = None,
) -> tuple[Float[Array, "b t d"], States | None]:
    """Normalised outputs of the last layer; the caches with what counts of the tokens.

    Args:
      cache: None for whole texts, as in training.
      new_lengths: how many of the t tokens count, default all; with a cache.
      segment_ids: equal for the tokens of one text, of texts that are packed in a row;
        without a cache.
      images: what the placeholders of these tokens stand for; without it the tokens
        are text.
    """
    decoder.check_reading(cache, new_lengths, segment_ids)
    if images is not None and images.feature.shape != tokens.shape:
        raise ValueError(
            f"hidden_states: `tokens` are {tokens.shape}, `images` of texts of "
            f"{images.feature.shape}. Make them of the same rows, filled up alike."
        )
    x = embed(tokens, weights.embedding, jnp.dtype(config.dtype))
    behind: list[Float[Array, "b t d"]] = []
    if images is None:
        at = next_positions(tokens, cache, segment_ids)
        if cache is not None:
            at = at - spared_of(cache)[:, None]
        positions = jnp.broadcast_to(at[..., None], (*at.shape, 3))
    else:
        positions = images.positions
        features = images.seen
        if isinstance(features, Patches):
            features = image_features(config.vision, config, weights.vision, features)
        shown = images.feature[..., None]

        def placed(rows: Float[Array, "b f d"], otherwise: Array) -> Array:
            found = jnp.take_along_axis(rows, jnp.maximum(shown, 0), axis=1)
            return jnp.where(shown < 0, otherwise, found.astype(x.dtype))

        zero = jnp.zeros((), x.dtype)
        behind = [placed(level, zero) for level in features.deep]
        x = placed(features.rows, x)
    tables = lax.optimization_barrier(  # else computed in every layer
        mrope_cos_sin(
            jnp.moveaxis(positions, -1, 0),
            config.rotation.dim,
            sections=config.sections,
            layout="interleaved",
            theta=config.rotation.theta,
            scaling=config.rotation.scaling,
        )
    )
    turns = {config.rotation: tables}
    mixing = Mixing(new_lengths, segment_ids, turns, positions[..., 0])
    x, after = through_layers(config, weights, x, cache, mixing, behind)
    if cache is None or after is None:
        return x, None
    first, *others = after
    assert isinstance(first, KVCache)
    used = cache[0].lengths - spared_of(cache)  # positions before
    counts = jnp.arange(tokens.shape[1]) < (first.lengths - cache[0].lengths)[:, None]
    here = jnp.max(jnp.where(counts[..., None], positions + 1, 0), axis=(1, 2))
    spared = first.lengths - jnp.maximum(used, here)
    return x, (PlacedCache.of(first, spared), *others)


def spared_of(cache: States) -> Int32[Array, " b"]:
    first = cache[0]
    assert isinstance(first, PlacedCache)
    return first.spared
