"""Prompts as the rows of one array, with their images."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.models.architecture import ModelConfig
from jaxkern.models.image_prompts import (
    Shown,
    batch_of,
    expanded,
    reads_images,
    with_images,
)


def check_sizes(
    config: ModelConfig, batch: int, prompt_slots: int, max_tokens: int, chunk: int
) -> None:
    """Raises a ValueError if there is nothing to do, or no room for it."""
    if min(batch, prompt_slots, max_tokens, chunk) < 1:
        raise ValueError(
            "generate: `batch`, `prompt_slots`, `max_tokens` and `chunk` must be "
            f"at least 1, got {batch}, {prompt_slots}, {max_tokens} and {chunk}."
        )
    if prompt_slots + max_tokens > config.context:
        raise ValueError(
            f"generate: {prompt_slots} tokens of prompt and {max_tokens} of answer "
            f"are more than the model's context of {config.context}."
        )


def check_seed(seed: int, op: str = "generate") -> None:
    if not -(2**31) <= whole_number(op, "seed", seed) < 2**31:
        raise ValueError(f"{op}: `seed` must be 32 bits wide, got {seed}.")


def stop_tokens(stop_ids: Iterable[int], op: str = "generate") -> tuple[int, ...]:
    """The tokens that end an answer, in order."""
    found = sorted(whole_number(op, "stop_ids", i) for i in stop_ids)
    if found and not -(2**31) <= found[0] <= found[-1] < 2**31:
        raise ValueError(f"{op}: `stop_ids` must be 32 bits wide, got {found}.")
    return tuple(found)


def whole_number(op: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{op}: `{name}` must be whole numbers, got {value!r}."
        ) from None


def longest_of(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of the longest prompt.

    Raises:
      TypeError: they are no lists, such as the tokens of one prompt.
    """
    for prompt in prompts:
        if not hasattr(prompt, "__len__"):
            raise TypeError(
                "generate: `prompts` must be lists of tokens, one for each sequence, "
                f"got {prompt!r} in the place of one."
            )
    return max(map(len, prompts))


def prompt_rows(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[Shown]] | None,
    slots: int,
    patches: int,
) -> tuple:
    """int32 tokens `[b, slots]` and lengths `[b]`, and the images if there may be any.

    Raises:
      ValueError: a prompt is empty, too long or no list of tokens, or has more patches
        than `patches`.
    """
    shown = None
    if reads_images(config) or images is not None:
        shown = expanded(config, prompts, images)
        prompts = [prompt.tokens for prompt in shown]
    longest_of(prompts)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if not all(1 <= n <= slots for n in lengths):
        raise ValueError(
            f"generate: prompts must have 1 to {slots} tokens, got {lengths.tolist()}."
        )
    if shown and max(p.patches for p in shown) > patches:
        raise ValueError(
            f"generate: images may have {patches} patches a prompt, got "
            f"{[p.patches for p in shown]}. Give a larger `image_patches`."
        )
    tokens = np.zeros((len(prompts), slots), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        ids, most = np.asarray(prompt), config.vocabulary
        whole = ids.dtype.kind in "iu" and ids.ndim == 1
        if not whole or ids.min() < 0 or ids.max() >= most:
            raise ValueError(
                f"generate: prompts must be integers below {most}, the "
                f"number of tokens, got {list(prompt)}."
            )
        row[: len(prompt)] = ids
    if shown and patches:
        return tokens, lengths, batch_of(config, shown, slots, patches)
    return tokens, lengths


def prompt_shapes(config: ModelConfig, batch: int, slots: int, patches: int) -> tuple:
    """Shapes and dtypes of what `prompt_rows` gives."""
    shapes = (
        jax.ShapeDtypeStruct((batch, slots), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    if not patches:
        return shapes
    images: Any = batch_of(
        config, [with_images(config, [], [])] * batch, slots, patches
    )
    return *shapes, jax.eval_shape(lambda: images)
