"""GGUF files: metadata and weights, memory-mapped  (ggml/docs/gguf.md).

    magic version n_tensors n_kv | keys and values | tensor infos | padding | weights

The header is read by a bounded parser of our own: every count is checked against the
bytes that are left before anything is allocated for it, so that a broken or hostile
file gives one `GGUFError` and costs no more memory than a few times its size.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
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
LEAST_STRING = 8  # bytes of an empty string: its length
LEAST_PAIR = LEAST_STRING + 4 + 1  # key, value type, one-byte value
LEAST_TENSOR_INFO = LEAST_STRING + 4 + 8 + 4 + 8  # name, n_dims, one dim, type, offset


class GGUFError(ValueError):
    """A file that cannot be read as GGUF: which file, which field, what is wrong."""


@dataclass(frozen=True)
class GGUFTensorInfo:
    """Where a tensor lies in the file and how.

    Attributes:
      shape: row-major (the order of JAX; the file stores it reversed).
      qtype: name of the block format, such as "Q4_K" or "F32".
      offset: of the first byte, from the start of the file.
      nbytes: bytes in the file.
    """

    shape: tuple[int, ...]
    qtype: str
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return prod(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file; see `read_gguf`.

    Attributes:
      path: as given.
      version: of the container format, 2 or 3.
      metadata: key -> int, float, bool, str, list of str, or a read-only numpy array.
      tensors: name -> where and how it is stored, in the order of the file.
    """

    path: str
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensorInfo]
    _bytes: np.ndarray = field(repr=False)
    _map: mmap.mmap = field(repr=False)

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as "llama"; the prefix of the model's keys."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise GGUFError(
                f"{self.path}: key general.architecture is {name!r}, expected a string."
            )
        return name

    def view(self, name: str) -> np.ndarray:
        """A tensor's bytes as a read-only view of the map: nothing is copied or read.

        Returns:
          float32, float16 or bfloat16 of the tensor's shape; for a block format uint8
          `[..., row_bytes]`.
        """
        info = self._info(name)
        if info.qtype not in BLOCK_FORMATS:
            raise GGUFError(
                f"{self.path}: tensor {name} has type {info.qtype}, expected one of "
                f"{', '.join(BLOCK_FORMATS)}."
            )
        data = self._bytes[info.offset : info.offset + info.nbytes]
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
            self._map.madvise(mmap.MADV_DONTNEED, start, size)

    def _info(self, name: str) -> GGUFTensorInfo:
        if name not in self.tensors:
            raise GGUFError(
                f"{self.path}: has no tensor {name!r} among its {len(self.tensors)}."
            )
        return self.tensors[name]


def read_gguf(path: str | PathLike[str]) -> GGUFFile:
    """Opens a GGUF file: reads its header, maps its weights.

    Args:
      path: a little-endian GGUF file, version 2 or 3.

    Returns:
      The file with its metadata and tensor infos; weights come with `.load(name)`.

    Raises:
      GGUFError: the file is not GGUF, is truncated or contradicts itself.
      OSError: the file cannot be opened.
    """
    path = fspath(path)
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            raise GGUFError(f"{path}: is empty, expected a GGUF file.")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
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
        """The next integer; `kind` is a `struct` letter such as "I" or "Q"."""
        start = self.skip(struct.calcsize(f"<{kind}"), what)
        return struct.unpack_from(f"<{kind}", self.bytes, start)[0]

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
        if code not in set(GGUFValueType):
            raise self.error(
                f"{what} is {code}, expected 0 to {max(GGUFValueType).value}"
            )
        return GGUFValueType(code)

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
    relative: dict[str, GGUFTensorInfo] = {}
    for i in range(n_tensors):
        name = header.string(f"name of tensor {i}")
        if name in relative:
            raise header.error(f"tensor {name!r} occurs twice")
        relative[name] = _read_tensor_info(header, f"tensor {name!r}", alignment)
    start = -(-header.offset // alignment) * alignment
    tensors = {
        name: GGUFTensorInfo(info.shape, info.qtype, start + info.offset, info.nbytes)
        for name, info in relative.items()
    }
    _check_extents(header, tensors)
    return tensors


def _read_tensor_info(header: _Header, what: str, alignment: int) -> GGUFTensorInfo:
    """One tensor info, its offset still from the start of the weights."""
    n_dims = header.integer("I", f"number of dims of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise header.error(
            f"number of dims of {what} is {n_dims}, expected 1 to {MAX_DIMS}"
        )
    dims = [header.integer("Q", f"dims of {what}") for _ in range(n_dims)]
    if 0 in dims:
        raise header.error(f"dims of {what} are {dims}, expected no zero")
    code = header.integer("I", f"type of {what}")
    if code not in set(GGMLQuantizationType):
        raise header.error(f"type of {what} is {code}, expected a ggml type")
    qtype = GGMLQuantizationType(code)
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
    return GGUFTensorInfo(tuple(reversed(dims)), qtype.name, offset, nbytes)


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
