"""`write_model_folder`: weights of the "train" policy as a folder of Hugging Face.

A model's weights are read by an `Architecture`, which puts tensors side by side. Here
it reads names in the place of tensors, which says what each array is made of.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike, fspath
from typing import Any

import jax
import numpy as np

from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.models.registry import Described, as_pattern
from jaxkern.train.new_model import NewModel

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
LAST_NAME = ("phi3", "lfm2")  # of two names of one tensor theirs is the last


@dataclass(frozen=True)
class Origin:
    """The tensors that an array is made of.

    Attributes:
      names: side by side on the first dim; or of an array each along it.
      plus: what was added.
    """

    names: tuple[str, ...]
    plus: float = 0.0

    def __getitem__(self, key: Any) -> "Origin":
        if key != (slice(None), 0):
            raise TypeError("a part of a tensor")
        return self

    def reshape(self, *shape: int) -> "Origin":
        del shape  # the order of the elements stays
        return self


class Origins:
    """A `WeightReader` whose arrays are origins."""

    from_folder = True

    def __init__(self, names: Mapping[str, Any]):
        self.tensors = names
        self.file = self  # of which the tensors' names are read

    def has(self, name: str) -> bool:
        return name in self.tensors

    def vector(self, name: str, *, plus: float = 0.0) -> Origin:
        return Origin((name,), plus)

    def vectors(self, *names: str, plus: float = 0.0) -> Origin | None:
        return Origin(names, plus) if any(map(self.has, names)) else None

    def matrices(self, *names: str) -> tuple[Origin, ...]:
        return (Origin(names),)

    def stacked(self, *names: str) -> Origin:
        return Origin(names)

    def array(self, name: str) -> Origin:
        return Origin((name,))

    def load(self, name: str) -> Origin:
        return Origin((name,))

    def table(self, name: str) -> Origin:
        return Origin((name,))

    experts = stacked

    def table_and_output(self) -> tuple[Origin, tuple[Origin, ...]]:
        own = self.has("output.weight")
        output = self.matrices("output.weight") if own else ()
        return Origin(("token_embd.weight",)), output


def origins_of(model: Described) -> list[Origin]:
    """Of each array of the weights, in the order of a pytree.

    Raises:
      ValueError: some array is more than tensors side by side.
    """
    try:
        found: Any = model.architecture.weights(
            model.config, Origins(model.file.tensors)
        )  # pyright: ignore
        leaves: list[Any] = jax.tree.leaves(found)
    except (TypeError, AttributeError, AssertionError):  # it works on the arrays
        leaves = [None]
    if not all(isinstance(leaf, Origin) for leaf in leaves):
        raise ValueError(
            f"model: weights of {model.architecture.name} are not written as a folder, "
            "since arrays in memory are more than its tensors side by side. The "
            "checkpoints have them."
        )
    return leaves


def tensors_of(model: Described, weights: Any) -> dict[str, np.ndarray]:
    """The tensors of a folder, by their names there."""
    found: dict[str, np.ndarray] = {}
    file = model.file
    assert isinstance(file, SafetensorsFolder)
    leaves = jax.tree.leaves(weights)
    for origin, leaf in zip(origins_of(model), leaves, strict=True):
        array = np.asarray(leaf)
        shapes = [model.tensors[name] for name in origin.names]
        size = sum(map(prod, shapes))
        assert size == array.size, (origin.names, array.shape)
        flat, start = array.reshape(-1), 0
        for name, shape in zip(origin.names, shapes, strict=True):
            end = start + prod(shape)
            if name in file.tensors:
                stored = flat[start:end].reshape(shape)
                if origin.plus:
                    stored = stored - stored.dtype.type(origin.plus)
                found[stored_name(model, name)] = stored
            start = end
    return found


def stored_name(model: Described, name: str) -> str:
    """How a folder calls a tensor: as the one that was read, or as `transformers`."""
    file, architecture = model.file, model.architecture
    assert isinstance(file, SafetensorsFolder)
    if not isinstance(file, NewModel):
        return file.called(name)
    found = [
        stored.format(**match.groupdict())
        for stored, new in architecture.names.items()
        if (match := as_pattern(new).fullmatch(name))
    ]
    return found[-1 if architecture.name in LAST_NAME else 0]


def write_model_folder(
    path: str | PathLike[str],
    model: Described,
    weights: Any,
    *,
    config: Mapping[str, Any] | None = None,
    source: str | None = None,
    dtype: Any = np.float32,
) -> None:
    """Writes `config.json` and `model.safetensors`, which `load` reads.

    Args:
      path: a folder; what was written there before is replaced.
      model: what was read or is new, from a folder's keys.
      weights: in the layout of the "train" policy.
      config: what config.json says; None copies that of `source`.
      source: the folder that was read, whose tokenizer goes along.
      dtype: of the tensors.

    Raises:
      ValueError: weights of this architecture cannot be written.
      OSError: the folder cannot be written to.
    """
    from safetensors.numpy import save_file

    tensors = tensors_of(model, weights)
    dense = {n: np.ascontiguousarray(w.astype(dtype)) for n, w in tensors.items()}
    path = fspath(path)
    os.makedirs(path, exist_ok=True)
    if config is not None:
        with open(os.path.join(path, "config.json"), "w") as file:
            json.dump(config, file, indent=1)
    if source is not None:
        for name in COPIED if config else ("config.json", *COPIED):
            place = os.path.join(source, name)
            if os.path.isfile(place):
                shutil.copyfile(place, os.path.join(path, name))
    whole = os.path.join(path, "model.safetensors")
    save_file(dense, f"{whole}.part", metadata={"format": "pt"})
    os.replace(f"{whole}.part", whole)
