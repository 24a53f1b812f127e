"""GGUF files: metadata and weights, memory-mapped  (ggml/docs/gguf.md).

    magic version n_tensors n_kv | keys and values | tensor infos | padding | weights

The header is read by a bounded parser of our own: every count is checked against the
bytes that are left before anything is allocated for it, so that a broken or hostile
file gives one `GGUFError` and costs no more memory than a few times its size.

A model may come in parts, `NAME-00001-of-00003.gguf` and so on: the first has the
metadata, each some of the weights.
"""

import mmap
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
from gguf import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)
from jax.sharding import Sharding

from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS, FLOAT_TYPES
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor

VERSIONS = (2, 3)  # version 1 had 32-bit counts and is extinct
MAX_DIMS = 4
SCALAR_DTYPES = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
INTEGERS = {kind: struct.Struct(f"<{kind}") for kind in "IQ"}
VALUE_TYPES = {kind.value: kind for kind in GGUFValueType}
BLOCK_TYPES = {kind.value: kind for kind in GGMLQuantizationType}
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)  # of a split file
LEAST_STRING = 8  # bytes of an empty string: its length
LEAST_PAIR = LEAST_STRING + 4 + 1  # key, value type, one-byte value
LEAST_TENSOR_INFO = LEAST_STRING + 4 + 8 + 4 + 8  # name, n_dims, one dim, type, offset


class GGUFError(ValueError):
    """A file that cannot be read as GGUF: which file, which field, what is wrong."""


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where a tensor lies in the file and how.

    Attributes:
      shape: row-major (the order of JAX; the file stores it reversed).
      qtype: name of the block format, such as "Q4_K" or "F32".
      offset: of the first byte, from the start of the file.
      nbytes: bytes in the file.
      part: of a split file, counted from 0.
    """

    shape: tuple[int, ...]
    qtype: str
    offset: int
    nbytes: int
    part: int = 0

    @property
    def size(self) -> int:
        """Number of weights."""
        return prod(self.shape)


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
    header = _Header(path, mapped)
    version = _read_version(header)
    n_tensors = header.count("tensor count", least=LEAST_TENSOR_INFO)
    n_pairs = header.count("key count", least=LEAST_PAIR)
    metadata = _read_metadata(header, n_pairs)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise header.error(
            f"key general.alignment is {alignment!r}, expected a power of two"
        )
    tensors = _read_tensor_infos(header, n_tensors, alignment)
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


class _Header:
    """Reads from the front of the file; `offset` is the next byte."""

    def __init__(self, path: str, mapped: mmap.mmap):
        self.path, self.bytes, self.offset = path, mapped, 0

    def error(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {message}.")

    def skip(self, size: int, what: str) -> int:
        """Offset of the next `size` bytes, which are then passed."""
        start, left = self.offset, len(self.bytes) - self.offset
        if size > left:
            raise self.error(
                f"{what} at byte {start} needs {size} bytes, the file has {left} left"
            )
        self.offset += size
        return start

    def integer(self, kind: str, what: str) -> int:
        """The next integer; `kind` is the `struct` letter "I" or "Q"."""
        integer = INTEGERS[kind]
        return integer.unpack_from(self.bytes, self.skip(integer.size, what))[0]

    def count(self, what: str, *, least: int) -> int:
        """The next 64-bit count, of things that take at least `least` bytes each."""
        n, left = self.integer("Q", what), len(self.bytes) - self.offset
        if n * least > left:
            raise self.error(
                f"{what} is {n}, expected at most {left // least} in the {left} bytes "
                "that are left"
            )
        return n

    def string(self, what: str) -> str:
        size = self.count(f"length of {what}", least=1)
        start = self.skip(size, what)
        try:
            return str(self.bytes[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} at byte {start} is not UTF-8") from None

    def value_type(self, what: str) -> GGUFValueType:
        code = self.integer("I", what)
        if code not in VALUE_TYPES:
            raise self.error(f"{what} is {code}, expected 0 to {max(VALUE_TYPES)}")
        return VALUE_TYPES[code]

    def value(self, what: str) -> Any:
        kind = self.value_type(f"type of {what}")
        if kind is GGUFValueType.STRING:
            return self.string(what)
        if kind is not GGUFValueType.ARRAY:
            return self.scalars(kind, 1, what)[0].item()
        kind = self.value_type(f"item type of {what}")
        if kind is GGUFValueType.ARRAY:
            raise self.error(f"{what} is an array of arrays, expected a flat array")
        if kind is GGUFValueType.STRING:
            n = self.count(f"length of {what}", least=LEAST_STRING)
            return [self.string(what) for _ in range(n)]
        n = self.count(
            f"length of {what}", least=np.dtype(SCALAR_DTYPES[kind]).itemsize
        )
        return self.scalars(kind, n, what)

    def scalars(self, kind: GGUFValueType, n: int, what: str) -> np.ndarray:
        dtype = np.dtype(SCALAR_DTYPES[kind])
        start = self.skip(n * dtype.itemsize, what)
        return np.frombuffer(self.bytes, dtype, n, start)


def _read_version(header: _Header) -> int:
    magic = header.bytes[header.skip(4, "magic") : 4]
    if magic != b"GGUF":
        raise header.error(f"magic is {magic!r}, expected b'GGUF'")
    version = header.integer("I", "version")
    if version not in VERSIONS:
        big_endian = version & 0xFFFF == 0
        raise header.error(
            "the file is big-endian, expected little-endian"
            if big_endian
            else f"version is {version}, expected one of {VERSIONS}"
        )
    return version


def _read_metadata(header: _Header, n_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(n_pairs):
        key = header.string(f"key {i}")
        if key in metadata:
            raise header.error(f"key {key!r} occurs twice")
        metadata[key] = header.value(f"key {key!r}")
    return metadata


def _read_tensor_infos(
    header: _Header, n_tensors: int, alignment: int
) -> dict[str, GGUFTensorInfo]:
    relative: dict[str, tuple] = {}
    for i in range(n_tensors):
        name = header.string(f"name of tensor {i}")
        if name in relative:
            raise header.error(f"tensor {name!r} occurs twice")
        relative[name] = _read_tensor_info(header, f"tensor {name!r}", alignment)
    start = -(-header.offset // alignment) * alignment
    tensors = {
        name: GGUFTensorInfo(shape, qtype, start + offset, nbytes)
        for name, (shape, qtype, offset, nbytes) in relative.items()
    }
    _check_extents(header, tensors)
    return tensors


def _read_tensor_info(
    header: _Header, what: str, alignment: int
) -> tuple[tuple[int, ...], str, int, int]:
    """Fields of one tensor info, its offset still from the start of the weights."""
    n_dims = header.integer("I", f"number of dims of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise header.error(
            f"number of dims of {what} is {n_dims}, expected 1 to {MAX_DIMS}"
        )
    dims = [header.integer("Q", f"dims of {what}") for _ in range(n_dims)]
    if 0 in dims:
        raise header.error(f"dims of {what} are {dims}, expected no zero")
    code = header.integer("I", f"type of {what}")
    if code not in BLOCK_TYPES:
        raise header.error(f"type of {what} is {code}, expected a ggml type")
    qtype = BLOCK_TYPES[code]
    elements, block_bytes = GGML_QUANT_SIZES[qtype]
    if dims[0] % elements:
        raise header.error(
            f"row length of {what} is {dims[0]}, expected a multiple of the {elements} "
            f"elements of a {qtype.name} block"
        )
    offset = header.integer("Q", f"offset of {what}")
    if offset % alignment:
        raise header.error(
            f"offset of {what} is {offset}, expected a multiple of {alignment}"
        )
    nbytes = prod(dims) // elements * block_bytes
    return tuple(reversed(dims)), qtype.name, offset, nbytes


def _check_extents(header: _Header, tensors: Mapping[str, GGUFTensorInfo]) -> None:
    """Every tensor lies within the file and no two share a byte."""
    end, before = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
        if info.offset < end:
            raise header.error(
                f"tensor {name!r} starts at byte {info.offset}, expected at {end} or "
                f"later, where tensor {before!r} ends"
            )
        end, before = info.offset + info.nbytes, name
        if end > len(header.bytes):
            raise header.error(
                f"tensor {name!r} ends at byte {end}, the file has only "
                f"{len(header.bytes)}: it is truncated or its header is damaged"
            )
