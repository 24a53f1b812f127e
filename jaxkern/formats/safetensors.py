"""Folders of Hugging Face: `config.json` and weights as safetensors, maybe in shards.

    config.json  model.safetensors
    config.json  model.safetensors.index.json  model-00001-of-00002.safetensors  ...

The `safetensors` package reads the weights and checks their headers: offsets that
overlap or leave the file, shapes that overflow. Checked here is what stands around
them: the sizes of the JSON files, and that the index names files of this folder only.
Weights that are packed in several tensors become one (`quantized_folder.py`).
"""

import json
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from os import PathLike, fspath
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open

from jaxkern.formats.finite_weights import BROKEN, NOT_FINITE, FiniteCheck
from jaxkern.formats.gguf import GGUFTensorInfo
from jaxkern.formats.packed_matrix import PackedMatrix
from jaxkern.formats.packing import Packing
from jaxkern.formats.quantized_folder import packed_weights
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

LONGEST_JSON = 2**26  # bytes; the index of a model of 10^5 tensors has 2^23
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
FLOAT8 = {"F8_E4M3": 1, "F8_E8M0": 1}  # of which NumPy knows the bytes alone
CODES = FLOAT8 | {"U8": 1, "I8": 1, "I32": 4, "I64": 8}  # that are parts of weights
QTYPES = {"F32": 4, "F16": 2, "BF16": 2, **CODES}  # itemsizes


class SafetensorsError(ValueError):
    """A folder that cannot be read: which file, what is wrong."""


@dataclass(frozen=True)
class SafetensorsFolder:
    """An open folder; see `read_safetensors_folder`. Looks like a `GGUFFile`.

    Attributes:
      path: as given.
      metadata: `config.json` as `<model_type>.<key>`, what is nested with dots; what is
        null is left out.
      tensors: name -> shape and dtype, a key of QTYPES; of packed weights the shape of
        the weights and their kind, such as "int4".
    """

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensorInfo]
    _shards: Mapping[str, safe_open] = field(repr=False)  # of each stored name
    _names: Mapping[str, str] = field(default_factory=dict, repr=False)  # to stored
    _places: Mapping[str, tuple[str, int]] = field(default_factory=dict, repr=False)
    _packed: Mapping[str, PackedMatrix] = field(default_factory=dict, repr=False)
    _finite: FiniteCheck | None = field(default=None, repr=False)

    @property
    def architecture(self) -> str:
        """`model_type` of config.json, such as "llama"."""
        return self.metadata["general.architecture"]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(info.nbytes for info in self.tensors.values())

    def error(self, message: str) -> SafetensorsError:
        return SafetensorsError(f"{self.path}: {message}.")

    def renamed(self, names: Mapping[str, str]) -> "SafetensorsFolder":
        """The folder with new names: `names[new] = stored`; others are left out."""
        tensors = {new: self.tensors[stored] for new, stored in names.items()}
        return replace(self, tensors=tensors, _names=dict(names))

    def checked(self, check: FiniteCheck) -> "SafetensorsFolder":
        """The folder, of which `check` looks at each tensor that is viewed."""
        return replace(self, _finite=check)

    def called(self, name: str) -> str:
        """How the folder itself calls a tensor."""
        return self._names.get(name, name)

    def packed(self, packing: Packing) -> "SafetensorsFolder":
        """The folder with weights in the place of their parts, and without its
        `quantization_config`, which these have followed."""
        if not packing.matrices:
            return self
        prefix = f"{self.architecture}.quantization_config."
        kept = {n: at for n, at in self.tensors.items() if n not in packing.taken}
        for name, w in packing.matrices.items():
            size = sum(self.tensors[part].nbytes for part in w.parts.values())
            kept[name] = GGUFTensorInfo(w.shape, w.kind, 0, size)
        metadata = {k: v for k, v in self.metadata.items() if not k.startswith(prefix)}
        return replace(
            self, tensors=kept, metadata=metadata, _packed=dict(packing.matrices)
        )

    def is_packed(self, name: str) -> bool:
        """Whether `load` gives a container of quantised weights."""
        return self.called(name) in self._packed

    def view(self, name: str, means: str | None = None) -> np.ndarray:
        """A tensor as a NumPy array: a copy; of 8-bit floats the bytes.

        `means` is the dtype that bytes stand for, where the file calls them integers.
        """
        if name not in self.tensors:
            raise self.error(f"has no tensor {name!r} among its {len(self.tensors)}")
        stored = self.called(name)
        if stored in self._packed:
            raise self.error(f"tensor {stored} is packed: it has no array")
        return self._stored(stored, means)

    def load(self, name: str, *, device: jax.Device | Sharding | None = None) -> Any:
        """A tensor on `device`, as an array or a `QuantizedTensor`."""
        if name not in self.tensors or not self.is_packed(name):
            return jax.device_put(self.view(name), device)
        return jax.device_put(self._container(self.called(name)), device)

    def _container(self, stored: str) -> QuantizedTensor:
        packed = self._packed[stored]
        try:
            return packed.read(self._stored)
        except ValueError as error:
            parts = ", ".join(packed.parts.values())
            raise self.error(f"one of the tensors {parts} {error}") from error

    def _stored(self, stored: str, means: str | None = None) -> np.ndarray:
        shard = self._shards[stored]
        info = shard.get_slice(stored)
        dtype = info.get_dtype()
        if dtype not in FLOAT8:
            array = shard.get_tensor(stored)
        else:
            shape, (file, begin) = info.get_shape(), self._places[stored]
            codes = np.fromfile(file, np.uint8, prod(shape), offset=begin)
            array = codes.reshape(shape)
        means = means or dtype
        if self._finite is not None and means in BROKEN:
            error = self.error(f"tensor {stored} {NOT_FINITE}")
            self._finite.look(stored, array, means, error)
        return array

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
    float8: dict[str, tuple[str, int]] = {}  # file and first byte of each
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
        if any(tensors[name].qtype in FLOAT8 for name in slices):
            float8 |= _first_bytes(os.path.join(path, shard))
    if missing := sorted((listed or {}).keys() - tensors.keys()):
        raise SafetensorsError(
            f"{path}: tensor {missing[0]!r} is in the index and in no shard."
        )
    folder = SafetensorsFolder(path, metadata, tensors, places, _places=float8)
    return folder.packed(packed_weights(folder))


def _info(path: str, name: str, shape: list[int], dtype: str) -> GGUFTensorInfo:
    if dtype not in QTYPES:
        raise SafetensorsError(
            f"{path}: tensor {name!r} is {dtype}, expected one of {', '.join(QTYPES)}."
        )
    size = int(np.prod(shape, dtype=np.object_))
    return GGUFTensorInfo(tuple(shape), dtype, 0, size * QTYPES[dtype])


def _first_bytes(file: str) -> dict[str, tuple[str, int]]:
    """Where each tensor begins in a file whose header has been checked."""
    with open(file, "rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(size))
    return {
        name: (file, 8 + size + at["data_offsets"][0])
        for name, at in header.items()
        if name != "__metadata__"
    }


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
