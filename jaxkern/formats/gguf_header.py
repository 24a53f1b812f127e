"""The front of a GGUF file, where everything but the weights is  (ggml/docs/gguf.md).

    magic version n_tensors n_kv | keys and values | tensor infos | padding | weights

A bounded parser: every count is checked against the bytes that are left before anything
is allocated for it. So a broken or hostile file gives one `GGUFError` and costs no more
memory than a few times its size.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

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


def read_header(
    path: str, mapped: mmap.mmap
) -> tuple[int, dict[str, Any], dict[str, GGUFTensorInfo]]:
    """Version, metadata and tensor infos of a file, or of one part of a split one."""
    header = Header(path, mapped)
    version = read_version(header)
    n_tensors = header.count("tensor count", least=LEAST_TENSOR_INFO)
    n_pairs = header.count("key count", least=LEAST_PAIR)
    metadata = read_metadata(header, n_pairs)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise header.error(
            f"key general.alignment is {alignment!r}, expected a power of two"
        )
    return version, metadata, read_tensor_infos(header, n_tensors, alignment)


class Header:
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


def read_version(header: Header) -> int:
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


def read_metadata(header: Header, n_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(n_pairs):
        key = header.string(f"key {i}")
        if key in metadata:
            raise header.error(f"key {key!r} occurs twice")
        metadata[key] = header.value(f"key {key!r}")
    return metadata


def read_tensor_infos(
    header: Header, n_tensors: int, alignment: int
) -> dict[str, GGUFTensorInfo]:
    relative: dict[str, tuple] = {}
    for i in range(n_tensors):
        name = header.string(f"name of tensor {i}")
        if name in relative:
            raise header.error(f"tensor {name!r} occurs twice")
        relative[name] = read_tensor_info(header, f"tensor {name!r}", alignment)
    start = -(-header.offset // alignment) * alignment
    tensors = {
        name: GGUFTensorInfo(shape, qtype, start + offset, nbytes)
        for name, (shape, qtype, offset, nbytes) in relative.items()
    }
    check_extents(header, tensors)
    return tensors


def read_tensor_info(
    header: Header, what: str, alignment: int
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


def check_extents(header: Header, tensors: Mapping[str, GGUFTensorInfo]) -> None:
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
