"""`write_gguf`: a GGUF file with the metadata of another one and other weights.

It is written under a temporary name beside its place and moved there when it is whole;
what is there already is never replaced.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath
from typing import Any

import gguf
import numpy as np

from jaxkern.formats.gguf import GGUFError, GGUFFile
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS

OF_ONE_FILE = ("GGUF.", "split.")  # what does not go over
REPLACED = ("general.architecture", "general.file_type", "general.quantization_version")


@contextlib.contextmanager
def new_file(path: str | PathLike[str]) -> Iterator[str]:
    """A temporary name beside `path`, which gets this name if the block succeeds.

    Raises:
      FileExistsError: something is there, before or after.
      OSError: the folder cannot be written to.
    """
    path = fspath(path)
    folder, name = os.path.split(os.path.abspath(path))
    refusal = FileExistsError(
        f"{path}: is there already. Remove it, or give a new name."
    )
    if os.path.lexists(path):
        raise refusal
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=".part")
    os.close(handle)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # as `open` makes them
        try:
            os.link(temporary, path)  # unlike a rename it replaces nothing
        except FileExistsError:
            raise refusal from None
        except OSError:  # a system without links
            os.rename(temporary, path)
            return
        os.unlink(temporary)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_gguf(
    path: str | PathLike[str],
    source: GGUFFile,
    qtypes: Mapping[str, str],
    blocks_of: Callable[[str], np.ndarray],
    *,
    file_type: int | None = None,
) -> None:
    """Writes a file with all keys of `source` and its tensors in other formats.

    Args:
      path: where nothing is yet.
      source: an open file.
      qtypes: the format of each tensor, in the order in which they are written.
      blocks_of: a tensor's bytes by its name: uint8 `[..., row_bytes]`, or plain
        floats. Called once for each, in order, when its turn comes.
      file_type: `general.file_type`, which says how most weights are kept.

    Raises:
      GGUFError: `blocks_of` gives other bytes than the format says.
      FileExistsError: something is there.
      OSError: it cannot be written.
    """
    with new_file(path) as temporary:
        writer = gguf.GGUFWriter(temporary, source.architecture)
        try:
            for name, value, kinds in typed_keys(source.path):
                writer.add_key_value(name, value, kinds[0], sub_type=kinds[-1])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            if file_type is not None:
                writer.add_file_type(file_type)
            shapes = {name: source.tensors[name].shape for name in qtypes}
            write_tensors(writer, shapes, qtypes, blocks_of)
        finally:
            writer.close()


def write_tensors(
    writer: gguf.GGUFWriter,
    shapes: Mapping[str, tuple[int, ...]],
    qtypes: Mapping[str, str],
    blocks_of: Callable[[str], np.ndarray],
) -> None:
    """Writes the keys that the writer has, and tensors one after the other.

    Args:
      shapes: of the tensors, in elements.
      qtypes, blocks_of: see `write_gguf`.
    """
    for name, qtype in qtypes.items():
        kind = gguf.GGMLQuantizationType[qtype]
        stored, nbytes = stored_shape(shapes[name], qtype)
        plain = {"F32": np.float32, "F16": np.float16}.get(qtype, np.uint8)
        writer.add_tensor_info(name, stored, np.dtype(plain), nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, qtype in qtypes.items():
        blocks = np.ascontiguousarray(blocks_of(name)).view(np.uint8)
        expected = stored_shape(shapes[name], qtype)[1]
        if blocks.nbytes != expected:
            raise GGUFError(
                f"write_gguf: tensor {name} has {blocks.nbytes} bytes as {qtype}, "
                f"expected {expected}."
            )
        writer.write_tensor_data(blocks)


def stored_shape(shape: tuple[int, ...], qtype: str) -> tuple[tuple[int, ...], int]:
    """The shape that the writer wants, rows in bytes for blocks; bytes of the whole."""
    form = BLOCK_FORMATS[qtype]
    row_bytes = shape[-1] // form.elements * form.bytes
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    in_bytes = qtype not in ("F32", "F16")
    return (*shape[:-1], row_bytes if in_bytes else shape[-1]), rows * row_bytes


def typed_keys(path: str) -> Iterator[tuple[str, Any, list[gguf.GGUFValueType]]]:
    """Keys of a file with the types that they have there, in order."""
    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith(OF_ONE_FILE) or name in REPLACED:
            continue
        value = field.contents()
        if isinstance(value, list) and not value:
            continue  # the writer refuses an empty list, which says no more than none
        yield name, value, field.types
