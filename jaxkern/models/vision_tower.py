"""The tower of Qwen3-VL that turns patches of images into rows of the text's width.

    x = patches @ patch + bias + places         a learned table of places, interpolated
    for each block:
        x = x + attention(layer_norm(x))        all patches of one image see each other
        x = x + down(gelu(up(layer_norm(x))))
    features = merger(x)                        m x m neighbours become one row

Some blocks have mergers of their own, whose rows are added to the hidden states behind
the first layers of the text (DeepStack, https://arxiv.org/abs/2406.04334). Heads rotate
by row and column of the patch. Patches lie block after block, so that neighbours that
merge stand next to each other.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxkern import attention, gelu, layer_norm, linear
from jaxkern.models.products import Matrices, Numerics, plus, project
from jaxkern.primitives.rope.axial_rope import axial_rope_cos_sin
from jaxkern.primitives.rope.rope import apply_rope

EPS = 1e-6  # of every norm; no key says it


@dataclass(frozen=True)
class VisionConfig:
    """What the weights of the tower do not say by their shapes.

    Attributes:
      blocks, d_model, heads, width: of the transformer; width is that of `up`.
      patch, frames, channels: a patch is `[channels, frames, patch, patch]` numbers;
        of an image every frame is the same.
      merge: m, how many patches a side become one feature.
      side: rows and columns of the table of places.
      deep: blocks whose features go to the first layers of the text, in their order.
      d_text: width of the features.
      theta: base of the rotation.
    """

    blocks: int
    d_model: int
    heads: int
    width: int
    patch: int
    frames: int
    channels: int
    merge: int
    side: int
    deep: tuple[int, ...]
    d_text: int
    theta: float = 10000.0

    @property
    def numbers(self) -> int:
        """Of one patch."""
        return self.channels * self.frames * self.patch**2


class Patches(NamedTuple):
    """Patches of the images of b texts, rows of different lengths filled up.

    Attributes:
      numbers: `[b, p, numbers]`, normalised pixels.
      place: `[b, p, 2]` int32, row and column in the image's grid of patches.
      grid: `[b, p, 2]` int32, rows and columns of that grid, at least 1.
      image: `[b, p]` int32, which image of the text it belongs to; -1 for filling.
    """

    numbers: Float[Array, "b p numbers"]
    place: Int32[Array, "b p 2"]
    grid: Int32[Array, "b p 2"]
    image: Int32[Array, "b p"]


class Features(NamedTuple):
    """What the tower saw.

    Attributes:
      rows: `[b, f, d]`, in the place of the embeddings of placeholders.
      deep: of each level `[b, f, d]`, to be added behind the first layers of the text.
    """

    rows: Float[Array, "b f d"]
    deep: tuple[Float[Array, "b f d"], ...]


class Norm(NamedTuple):
    """Of a layer norm."""

    weight: Float[Array, " d"]
    bias: Float[Array, " d"]


class Product(NamedTuple):
    """A matrix and what is added."""

    matrices: Matrices
    bias: Float[Array, " f"]


class BlockWeights(NamedTuple):
    """Weights of one block; rows of `qkv` are all of q, then k, then v."""

    attention_norm: Norm
    qkv: Product
    output: Product
    ffn_norm: Norm
    up: Product
    down: Product


class MergerWeights(NamedTuple):
    """Weights of a merger; its norm is of a patch, or of the merged neighbours."""

    norm: Norm
    up: Product
    down: Product


class VisionWeights(NamedTuple):
    """Weights of the tower; `deep` has a merger for each of `VisionConfig.deep`."""

    patch: Float[Array, "d numbers"]
    patch_bias: Float[Array, " d"]
    places: Float[Array, "s d"]
    blocks: tuple[BlockWeights, ...]
    merger: MergerWeights
    deep: tuple[MergerWeights, ...]


def image_features(
    config: VisionConfig, numerics: Numerics, weights: VisionWeights, patches: Patches
) -> Features:
    """The features of all images, those of m x m patches in a row.

    Args:
      config: of the tower.
      numerics: the config of the text model: how products round.
      weights: of the tower.
      patches: p is a multiple of m * m, and so is the number of each image's patches.

    Returns:
      `Features` with f = p / (m * m) rows for each text; those of filling mean nothing.
    """
    d = config.d_model
    x = linear(patches.numbers.astype(weights.patch.dtype), weights.patch)
    x = plus(x, weights.patch_bias) + places_of(config, weights.places, patches).astype(
        x.dtype
    )
    rotation = lax.optimization_barrier(  # else computed in every block
        axial_rope_cos_sin(
            jnp.moveaxis(patches.place, -1, 0), d // config.heads, theta=config.theta
        )
    )
    deep = []
    for i, block in enumerate(weights.blocks):
        x = vision_block(config, numerics, block, x, rotation, patches.image)
        if i in config.deep:
            merger = weights.deep[config.deep.index(i)]
            deep.append(merged(config, numerics, merger, x))
    return Features(merged(config, numerics, weights.merger, x), tuple(deep))


def places_of(
    config: VisionConfig, table: Float[Array, "s d"], patches: Patches
) -> Float[Array, "b p d"]:
    """Rows of the learned table of places, bilinear between the four around a patch.

    The corners of the table are the corners of the image, whatever its size.
    """
    side = config.side
    last = jnp.maximum(patches.grid - 1, 1)
    at = patches.place.astype(jnp.float32) * (side - 1) / last  # [b, p, 2]
    low = jnp.floor(at).astype(jnp.int32)
    share = at - low
    total = jnp.zeros((), jnp.float32)
    for i in (0, 1):
        for j in (0, 1):
            step = jnp.array([i, j])
            row, column = jnp.moveaxis(jnp.clip(low + step, 0, side - 1), -1, 0)
            factor = jnp.prod(jnp.where(step == 1, share, 1 - share), axis=-1)
            rows = table[row * side + column].astype(jnp.float32)
            total = total + rows * factor[..., None]
    return total


def vision_block(
    config: VisionConfig,
    numerics: Numerics,
    weights: BlockWeights,
    x: Float[Array, "b p d"],
    rotation: tuple[Float[Array, "b p r"], Float[Array, "b p r"]],
    image: Int[Array, "b p"],
) -> Float[Array, "b p d"]:
    """Attention within each image, then the feed-forward block, each added to x."""
    b, p, _ = x.shape
    y = multiplied(
        numerics, layer_norm(x, *weights.attention_norm, eps=EPS), weights.qkv
    )
    q, k, v = (
        part.reshape(b, p, config.heads, -1) for part in jnp.split(y, 3, axis=-1)
    )
    q, k = (apply_rope(a, *rotation, pairing="neox") for a in (q, k))
    y = attention(q, k, v, segment_ids=image)
    assert isinstance(y, jax.Array)  # no lse was asked for
    x = x + multiplied(numerics, y.reshape(b, p, -1), weights.output)
    y = multiplied(numerics, layer_norm(x, *weights.ffn_norm, eps=EPS), weights.up)
    return x + multiplied(numerics, gelu(y, approximate="tanh"), weights.down)


def merged(
    config: VisionConfig,
    numerics: Numerics,
    weights: MergerWeights,
    x: Float[Array, "b p d"],
) -> Float[Array, "b f d_text"]:
    """One row of the text's width for m x m patches."""
    b, d = x.shape[0], config.d_model
    if weights.norm.weight.size == d:
        x = layer_norm(x, *weights.norm, eps=EPS)
    x = x.reshape(b, -1, config.merge**2 * d)
    if weights.norm.weight.size != d:
        x = layer_norm(x, *weights.norm, eps=EPS)
    y = gelu(multiplied(numerics, x, weights.up), approximate="none")
    return multiplied(numerics, y, weights.down)


def multiplied(
    numerics: Numerics, x: Float[Array, "... d"], product: Product
) -> Float[Array, "... f"]:
    return plus(project(numerics, x, product.matrices), product.bias)
