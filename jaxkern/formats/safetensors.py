"""Folders of Hugging Face: `config.json` and weights as safetensors, maybe in shards.

    config.json  model.safetensors
    config.json  model.safetensors.index.json  model-00001-of-00002.safetensors  ...

The `safetensors` package reads the weights and checks their headers: offsets that
overlap or leave the file, shapes that overflow. Checked here is what stands around
them: the sizes of the JSON files, and that the index names files of this folder only.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open

from jaxkern.formats.gguf import GGUFTensorInfo

LONGEST_JSON = 2**26  # bytes; the index of a model of 10^5 tensors has 2^23
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
QTYPES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}  # itemsizes


class SafetensorsError(ValueError):
    """A folder that cannot be read: which file, what is wrong."""


@dataclass(frozen=True)
class SafetensorsFolder:
    """An open folder; see `read_safetensors_folder`. Looks like a `GGUFFile`.

    Attributes:
      path: as given.
      metadata: `config.json` as `<model_type>.<key>`, what is nested with dots; what is
        null is left out.
      tensors: name -> shape and dtype, as "F32", "F16", "BF16" or "U8".
    """

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensorInfo]
    _shards: Mapping[str, safe_open] = field(repr=False)  # of each stored name
    _names: Mapping[str, str] = field(default_factory=dict, repr=False)  # to stored

    @property
    def architecture(self) -> str:
        """`model_type` of config.json, such as "llama"."""
        return self.metadata["general.architecture"]

    def error(self, message: str) -> SafetensorsError:
        return SafetensorsError(f"{self.path}: {message}.")

    def renamed(self, names: Mapping[str, str]) -> "SafetensorsFolder":
        """The folder with new names: `names[new] = stored`; others are left out."""
        tensors = {new: self.tensors[stored] for new, stored in names.items()}
        return replace(self, tensors=tensors, _names=dict(names))

    def called(self, name: str) -> str:
        """How the folder itself calls a tensor."""
        return self._names.get(name, name)

    def view(self, name: str) -> np.ndarray:
        """A tensor as a NumPy array: a copy."""
        if name not in self.tensors:
            raise self.error(f"has no tensor {name!r} among its {len(self.tensors)}")
        stored = self.called(name)
        return self._shards[stored].get_tensor(stored)

    def load(
        self, name: str, *, device: jax.Device | Sharding | None = None
    ) -> jax.Array:
        """A tensor on `device`."""
        return jax.device_put(self.view(name), device)

    def forget(self, name: str) -> None:
        """Nothing: a view was a copy."""


def read_safetensors_folder(path: str | PathLike[str]) -> SafetensorsFolder:
    """Opens a folder with `config.json` and weights: reads the headers.

    Raises:
      SafetensorsError: files are missing, damaged or contradict each other, or a
        tensor's dtype is none of these.
      OSError: the folder cannot be read.
    """
    path = fspath(path)
    metadata = flat_keys(path, _json(path, "config.json"))
    shards, listed = _shard_names(path)
    tensors: dict[str, GGUFTensorInfo] = {}
    places: dict[str, safe_open] = {}
    for shard in shards:
        _check_regular(path, shard)
        try:
            opened = safe_open(os.path.join(path, shard), framework="np")
            names = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
        except SafetensorError as error:
            raise SafetensorsError(f"{path}: {shard}: {error}.") from error
        for name, stored in slices.items():
            if name in tensors:
                raise SafetensorsError(f"{path}: tensor {name!r} is in two shards.")
            if listed is not None and listed.get(name) != shard:
                raise SafetensorsError(
                    f"{path}: tensor {name!r} lies in {shard}, which the index does "
                    "not say."
                )
            tensors[name] = _info(path, name, stored.get_shape(), stored.get_dtype())
            places[name] = opened
    if missing := sorted((listed or {}).keys() - tensors.keys()):
        raise SafetensorsError(
            f"{path}: tensor {missing[0]!r} is in the index and in no shard."
        )
    return SafetensorsFolder(path, metadata, tensors, places)


def _info(path: str, name: str, shape: list[int], dtype: str) -> GGUFTensorInfo:
    if dtype not in QTYPES:
        raise SafetensorsError(
            f"{path}: tensor {name!r} is {dtype}, expected one of {', '.join(QTYPES)}. "
            "Quantised weights are read from GGUF files."
        )
    size = int(np.prod(shape, dtype=np.object_))
    return GGUFTensorInfo(tuple(shape), dtype, 0, size * QTYPES[dtype])


def _shard_names(path: str) -> tuple[list[str], dict[str, str] | None]:
    """Files with weights, and what the index says of each tensor, if there is one."""
    whole, index = "model.safetensors", "model.safetensors.index.json"
    there = {name for name in (whole, index) if os.path.lexists(f"{path}/{name}")}
    if there == {whole, index}:
        raise SafetensorsError(
            f"{path}: has {whole} and {index}. Remove the one that is not meant."
        )
    if index not in there:
        return [whole], None
    listed = _json(path, index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise SafetensorsError(f"{path}: {index} has no weight_map.")
    for name, shard in listed.items():
        if not isinstance(shard, str) or not SHARD.fullmatch(shard):
            raise SafetensorsError(
                f"{path}: {index} puts {name!r} into {shard!r}, expected the name of a "
                "file of this folder that ends in .safetensors."
            )
    return sorted(set(listed.values())), listed


def _check_regular(path: str, name: str) -> int:
    """Size of a file of the folder."""
    try:
        found = os.stat(os.path.join(path, name))
    except FileNotFoundError:
        raise SafetensorsError(f"{path}: has no file {name}.") from None
    if not stat.S_ISREG(found.st_mode):
        raise SafetensorsError(f"{path}: {name} is not a regular file.")
    return found.st_size


def _json(path: str, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder."""
    if (size := _check_regular(path, name)) > LONGEST_JSON:
        raise SafetensorsError(
            f"{path}: {name} has {size} bytes, expected at most {LONGEST_JSON}."
        )
    with open(os.path.join(path, name), "rb") as file:
        content = file.read()
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"{path}: {name} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise SafetensorsError(f"{path}: {name} is not a JSON object.")
    return found


def flat_keys(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as `SafetensorsFolder.metadata` has it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", kind):
        raise SafetensorsError(
            f"{path}: key model_type of config.json is {kind!r}, expected a name."
        )
    flat: dict[str, Any] = {"general.architecture": kind}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for inner, leaf in value.items():
                add(f"{name}.{inner}", leaf)
        elif value is not None:
            flat[name] = value

    add(kind, config)
    return flat
