"""Prompts with images: placeholders become as many tokens as features, with positions.

    prompts = [with_images(config, tokens, images), ...]
    images = batch_of(config, prompts, slots, patches)      what `hidden_states` takes

A prompt has one placeholder, the token `config.image_token`, for each of its images, as
chat templates write it. All of this is on the host: shapes follow from the images.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxkern.models.image_rule import Picture, preprocess, vision_of
from jaxkern.models.qwen3_vl import ImageText
from jaxkern.models.vision_tower import Features, Patches

Shown = Any
"""An image of Pillow, the name of a file, or a `Picture`."""


class Prompt(NamedTuple):
    """A text with images.

    Attributes:
      tokens: with as many placeholders as features.
      feature: `[t]`, which feature a token stands for, -1 for text.
      positions: `[t, 3]`, time, row and column.
      pictures: in the order of their placeholders.
    """

    tokens: list[int]
    feature: Int32[np.ndarray, " t"]
    positions: Int32[np.ndarray, "t 3"]
    pictures: tuple[Picture, ...]

    @property
    def patches(self) -> int:
        return sum(len(picture.numbers) for picture in self.pictures)


def with_images(config: Any, tokens: Sequence[int], images: Sequence[Shown]) -> Prompt:
    """A text with its images in their places.

    Text counts on, token by token, in all three positions. An image's features have the
    position of the token before plus 1 as their time; row and column count from there.
    The text behind goes on past the largest of them.

    Args:
      config: of a model that reads images.
      tokens: with one placeholder for each image.
      images: in the order of the placeholders.

    Raises:
      ValueError: the model reads no images, other placeholders than images, a video, or
        an image that cannot be read.
    """
    vision = vision_of(config)
    pictures = tuple(
        image if isinstance(image, Picture) else preprocess(image, config)
        for image in images
    )
    given = [int(token) for token in tokens]
    if config.video_token in given:
        raise ValueError(
            "generate: the prompt has a placeholder of a video, which is not read. "
            "Show frames of it as images."
        )
    if (found := given.count(config.image_token)) != len(pictures):
        raise ValueError(
            f"generate: the prompt has {found} placeholders of images, token "
            f"{config.image_token}, for {len(pictures)} images. Give one for each."
        )
    new: list[int] = []
    feature: list[int] = []
    positions: list[tuple[int, int, int]] = []
    at = features = 0
    left = iter(pictures)
    for token in given:
        if token != config.image_token:
            new.append(token)
            feature.append(-1)
            positions.append((at, at, at))
            at += 1
            continue
        picture = next(left)
        rows, columns = (n // vision.merge for n in (picture.rows, picture.columns))
        new += [token] * (rows * columns)
        feature += range(features, features + rows * columns)
        features += rows * columns
        positions += [(at, at + i, at + j) for i in range(rows) for j in range(columns)]
        at += max(rows, columns)
    shape = (len(new), 3)
    return Prompt(
        new,
        np.array(feature, np.int32),
        np.array(positions, np.int32).reshape(shape),
        pictures,
    )


def reads_images(config: Any) -> bool:
    return getattr(config, "vision", None) is not None


def expanded(
    config: Any,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[Shown]] | None,
) -> list[Prompt]:
    """`with_images` of each prompt with its own ones; None for text alone."""
    images = [()] * len(prompts) if images is None else images
    if len(images) != len(prompts):
        raise ValueError(
            "generate: `images` must have a list for each prompt, got "
            f"{len(images)} for {len(prompts)} prompts."
        )
    pairs = zip(prompts, images, strict=True)
    return [with_images(config, prompt, shown) for prompt, shown in pairs]


def patches_of(config: Any, prompts: Sequence[Prompt], patches: int) -> Patches:
    """The patches of each prompt's images, filled up to so many."""
    vision = vision_of(config)
    b = len(prompts)
    numbers = np.zeros((b, patches, vision.numbers), np.float32)
    place = np.zeros((b, patches, 2), np.int32)
    grid = np.ones((b, patches, 2), np.int32)
    image = np.full((b, patches), -1, np.int32)
    for row, prompt in enumerate(prompts):
        end = 0
        for i, picture in enumerate(prompt.pictures):
            here = slice(end, end := end + len(picture.numbers))
            numbers[row, here], place[row, here] = picture.numbers, picture.place
            grid[row, here], image[row, here] = (picture.rows, picture.columns), i
    return Patches(numbers, place, grid, image)  # pyright: ignore[reportArgumentType]


def batch_of(
    config: Any, prompts: Sequence[Prompt], slots: int, patches: int
) -> ImageText:
    """Where the images of some prompts are, each filled up to `slots` tokens."""
    feature = np.full((len(prompts), slots), -1, np.int32)
    positions = np.zeros((len(prompts), slots, 3), np.int32)
    for row, prompt in enumerate(prompts):
        feature[row, : len(prompt.tokens)] = prompt.feature
        positions[row, : len(prompt.tokens)] = prompt.positions
    seen = patches_of(config, prompts, patches)
    return ImageText(seen, feature, positions)  # pyright: ignore[reportArgumentType]


def piece_of(
    prompt: Prompt, seen: Features, piece: slice, first: int, slots: int
) -> ImageText:
    """Some tokens of one prompt, filled up; `seen` begins at its feature `first`."""
    count = len(prompt.feature[piece])
    feature = np.full((1, slots), -1, np.int32)
    positions = np.zeros((1, slots, 3), np.int32)
    own = prompt.feature[piece]
    feature[0, :count] = np.where(own < 0, -1, own - first)
    positions[0, :count] = prompt.positions[piece]
    return ImageText(seen, feature, positions)  # pyright: ignore[reportArgumentType]
