"""GGUF files: metadata and weights, memory-mapped; `gguf_header` reads the front.

A model may come in parts, `NAME-00001-of-00003.gguf` and so on: the first has the
metadata, each some of the weights.
"""

import mmap
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

from jaxkern.formats.finite_weights import NOT_FINITE, FiniteCheck
from jaxkern.formats.gguf_header import GGUFError, GGUFTensorInfo, read_header
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS, FLOAT_TYPES
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)  # of a split file


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file; see `read_gguf`.

    Attributes:
      path: as given; of a split file, its first part.
      version: of the container format, 2 or 3.
      metadata: key -> int, float, bool, str, list of str, or a read-only numpy array.
      tensors: name -> where and how it is stored, in the order of the file.
      tower: the file of the tower of a model that reads images, as `joined` takes it.
    """

    path: str
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensorInfo]
    _bytes: np.ndarray = field(repr=False)
    _map: mmap.mmap = field(repr=False)
    _others: tuple["GGUFFile", ...] = field(default=(), repr=False)  # further parts
    tower: "GGUFFile | None" = None
    _finite: FiniteCheck | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the file, of all its parts if it is split, and of its tower."""
        further = (*self._others, self.tower) if self.tower else self._others
        return self._bytes.size + sum(file.nbytes for file in further)

    def joined(self, tower: "GGUFFile") -> "GGUFFile":
        """The file with the tensors of another one beside its own; keys are its own."""
        parts = 1 + len(self._others)
        further = {
            name: replace(info, part=parts + info.part)
            for name, info in tower.tensors.items()
        }
        if both := self.tensors.keys() & further.keys():
            raise tower.error(f"has tensor {min(both)}, and so has {self.path}")
        return replace(
            self,
            tensors={**self.tensors, **further},
            _others=(*self._others, replace(tower, _others=()), *tower._others),
            tower=None,
        )

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as "llama"; the prefix of the model's keys."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise self.error(f"key general.architecture is {name!r}, expected a string")
        return name

    def error(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {message}.")

    def checked(self, check: FiniteCheck) -> "GGUFFile":
        """The file, of which `check` looks at each tensor that is viewed."""
        return replace(self, _finite=check)

    def called(self, name: str) -> str:
        """How the file itself calls a tensor."""
        return name

    def view(self, name: str) -> np.ndarray:
        """A tensor's bytes as a read-only view of the map: nothing is copied or read.

        Returns:
          float32, float16 or bfloat16 of the tensor's shape; for a block format uint8
          `[..., row_bytes]`.
        """
        info = self._info(name)
        part = self._part(info)
        if info.qtype not in BLOCK_FORMATS:
            raise part.error(
                f"tensor {name} has type {info.qtype}, expected one of "
                f"{', '.join(BLOCK_FORMATS)}"
            )
        data = part._bytes[info.offset : info.offset + info.nbytes]
        if self._finite is not None:
            error = part.error(f"tensor {name} {NOT_FINITE}")
            self._finite.look(name, data, info.qtype, error)
        if info.qtype in FLOAT_TYPES:
            return data.view(FLOAT_TYPES[info.qtype]).reshape(info.shape)
        return data.reshape(*info.shape[:-1], -1)

    def load(
        self, name: str, *, device: jax.Device | Sharding | None = None
    ) -> jax.Array | GGUFTensor:
        """A tensor on `device`: an array for F32, F16 and BF16, else a `GGUFTensor`.

        The bytes go from the map straight to the device. On a CPU they stay in the map
        where they lie on a multiple of 64 bytes, so the file must not change meanwhile.
        """
        array = jax.device_put(self.view(name), device)
        qtype = self._info(name).qtype
        return array if qtype in FLOAT_TYPES else GGUFTensor(array, qtype)

    def forget(self, name: str) -> None:
        """Gives the memory of a tensor's bytes back; who reads them reads the file."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        info, page = self._info(name), mmap.PAGESIZE
        start = -(-info.offset // page) * page
        size = (info.offset + info.nbytes) // page * page - start
        if size > 0:
            self._part(info)._map.madvise(mmap.MADV_DONTNEED, start, size)

    def _part(self, info: GGUFTensorInfo) -> "GGUFFile":
        return (self, *self._others)[info.part]

    def _info(self, name: str) -> GGUFTensorInfo:
        if name not in self.tensors:
            raise GGUFError(
                f"{self.path}: has no tensor {name!r} among its {len(self.tensors)}."
            )
        return self.tensors[name]


def read_gguf(path: str | PathLike[str]) -> GGUFFile:
    """Opens a GGUF file: reads its header, maps its weights.

    Args:
      path: a little-endian GGUF file, version 2 or 3; any part of a split one, whose
        other parts lie beside it under the names that llama.cpp gives them.

    Returns:
      The file with its metadata and tensor infos; weights come with `.load(name)`.

    Raises:
      GGUFError: the file is not GGUF, is truncated or contradicts itself, or a part of
        it is missing.
      OSError: the file cannot be opened.
    """
    file = _read_one(fspath(path))
    count = _split_key(file, "split.count", 1)
    return file if count <= 1 else _with_parts(file, count)


def _read_one(path: str) -> GGUFFile:
    """One file, or one part of a split one."""
    with open(path, "rb", opener=_open_at_once) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise GGUFError(f"{path}: is not a regular file, expected a GGUF file.")
        if opened.seek(0, 2) == 0:
            raise GGUFError(f"{path}: is empty, expected a GGUF file.")
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    version, metadata, tensors = read_header(path, mapped)
    data = np.frombuffer(mapped, np.uint8)
    return GGUFFile(path, version, metadata, tensors, data, mapped)


def _open_at_once(path: str, flags: int) -> int:
    """`open` waits for the other end of a pipe; this does not."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _split_key(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise GGUFError(f"{file.path}: key {key} is {value!r}, expected a count.")
    return value


def _with_parts(opened: GGUFFile, count: int) -> GGUFFile:
    """The split file of which one part is open."""
    number = _split_key(opened, "split.no")
    what = f"{opened.path}: is part {number + 1} of a model split in {count}"
    match = PART.fullmatch(opened.path)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        raise GGUFError(
            f"{what}, expected a name that ends in "
            f"-{number + 1:05d}-of-{count:05d}.gguf. Give it the name it was made with."
        )
    paths = [f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    if missing := [path for path in paths if not os.path.exists(path)]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise GGUFError(
            f"{what}, of which {', '.join(missing[:3])}{more} cannot be found. Put all "
            "parts into one folder."
        )
    parts = [opened if i == number else _read_one(path) for i, path in enumerate(paths)]
    tensors: dict[str, GGUFTensorInfo] = {}
    for i, part in enumerate(parts):
        found = _split_key(part, "split.no"), _split_key(part, "split.count")
        if found != (i, count):
            raise GGUFError(
                f"{part.path}: says it is part {found[0] + 1} of {found[1]}, expected "
                f"{i + 1} of {count}."
            )
        for name, info in part.tensors.items():
            if name in tensors:
                raise GGUFError(f"{part.path}: tensor {name!r} occurs in two parts.")
            tensors[name] = replace(info, part=i)
    total = _split_key(parts[0], "split.tensors.count", len(tensors))
    if total != len(tensors):
        raise GGUFError(
            f"{parts[0].path}: the parts have {len(tensors)} tensors, expected {total}."
        )
    return replace(parts[0], tensors=tensors, _others=tuple(parts[1:]))
