"""`quantize_file`: a GGUF model in another block format, tensor by tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike

import gguf
import jax.numpy as jnp
import numpy as np

from jaxkern import GGUFTensor, dequantize, quantize_gguf
from jaxkern.formats.gguf import GGUFError, GGUFFile, read_gguf
from jaxkern.formats.gguf_mix import MIXES, qtype_in_mix
from jaxkern.formats.gguf_writer import write_gguf
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS, FLOAT_TYPES

PIECES = (2**21, 2**17)  # weights at once: two executables of each format serve all


@dataclass(frozen=True)
class QuantizedReport:
    """One tensor of the new file.

    Attributes:
      error: sqrt(sum (new - old)**2 / sum old**2), of finite weights.
      largest: max |new - old|.
    """

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    nbytes: int
    error: float
    largest: float


def quantize_file(
    source: str | PathLike[str],
    target: str | PathLike[str],
    mix: str,
    *,
    done: Callable[[QuantizedReport], None] = lambda report: None,
) -> list[QuantizedReport]:
    """Writes a GGUF model with its weights in other formats; its keys stay.

    Args:
      source: a GGUF file, or any part of a split one.
      target: where nothing is yet.
      mix: one of `jaxkern.formats.gguf_mix.MIXES`, such as "Q4_K_M" or "Q8_0".
      done: called after each tensor.

    Returns:
      What became of each tensor.

    Raises:
      ValueError: no such mix; the file cannot be read or a weight is not finite.
      FileExistsError: the target is there.
      OSError: it cannot be written.
    """
    if mix not in MIXES:
        raise ValueError(f"quantize: no {mix!r}, but {', '.join(MIXES)}.")
    file = read_gguf(source)
    qtypes = chosen_qtypes(file, mix)
    reports: list[QuantizedReport] = []

    def blocks_of(name: str) -> np.ndarray:
        info, qtype = file.tensors[name], qtypes[name]
        if info.qtype == qtype:
            blocks, error, largest = file.view(name), 0.0, 0.0
        else:
            blocks, error, largest = _requantized(file, name, qtype)
        report = QuantizedReport(
            name, info.shape, info.qtype, qtype, blocks.nbytes, error, largest
        )
        file.forget(name)
        reports.append(report)
        done(report)
        return blocks

    kind = gguf.LlamaFileType["ALL_F32" if mix == "F32" else f"MOSTLY_{mix}"]
    write_gguf(target, file, qtypes, blocks_of, file_type=kind)
    return reports


def chosen_qtypes(file: GGUFFile, mix: str) -> Mapping[str, str]:
    """The format of each tensor of the new file."""
    arch = file.architecture
    layers = file.metadata.get(f"{arch}.block_count")
    if type(layers) is not int or layers < 1:
        raise file.error(f"key {arch}.block_count is {layers!r}, expected a count")
    heads = file.metadata.get(f"{arch}.attention.head_count")
    shared = file.metadata.get(f"{arch}.attention.head_count_kv", heads)
    gqa = 1  # also where layers differ
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0:
        gqa = heads // shared
    tied = "output.weight" not in file.tensors
    found = {}
    for name, info in file.tensors.items():
        if info.qtype not in BLOCK_FORMATS:
            raise GGUFError(
                f"{file.path}: tensor {name} has type {info.qtype}, without a decoder."
            )
        to = qtype_in_mix(mix, name, info.shape, layers=layers, tied=tied, gqa=gqa)
        found[name] = to or info.qtype
    return found


def _requantized(
    file: GGUFFile, name: str, qtype: str
) -> tuple[np.ndarray, float, float]:
    """The tensor's new bytes, and both errors."""
    stored, info = file.view(name), file.tensors[name]
    flat = stored.reshape(-1)
    old = BLOCK_FORMATS[info.qtype]
    parts, squares, wrong, largest = [], 0.0, 0.0, 0.0
    start = 0
    while start < info.size:
        piece = PIECES[0] if info.size - start >= PIECES[0] else PIECES[1]
        take = min(piece, info.size - start)
        if info.qtype in FLOAT_TYPES:
            x = flat[start : start + take].astype(np.float32)
        else:
            cut = (n // old.elements * old.bytes for n in (start, start + take))
            x = _decoded(flat[slice(*cut)], info.qtype, piece)[:take]
        if not np.isfinite(x).all():
            raise file.error(f"tensor {name} has weights that are not finite")
        new, y = encoded(x, qtype, piece)
        parts.append(new)
        difference = (y - x).astype(np.float64)
        squares += float(np.square(x, dtype=np.float64).sum())
        wrong += float(np.square(difference).sum())
        largest = max(largest, float(np.abs(difference).max()))
        start += take
    return np.concatenate(parts), (wrong / squares) ** 0.5 if squares else 0.0, largest


def _decoded(blocks: np.ndarray, qtype: str, piece: int) -> np.ndarray:
    form = BLOCK_FORMATS[qtype]
    padded = np.zeros((piece // form.elements, form.bytes), np.uint8)
    padded.reshape(-1)[: blocks.size] = blocks
    return np.asarray(dequantize(GGUFTensor(jnp.asarray(padded), qtype))).reshape(-1)


def encoded(x: np.ndarray, qtype: str, piece: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of some whole blocks, and the weights that they mean."""
    if qtype in FLOAT_TYPES:
        y = x.astype(FLOAT_TYPES[qtype])
        return y.view(np.uint8), y.astype(np.float32)
    form = BLOCK_FORMATS[qtype]
    padded = np.zeros((piece // form.elements, form.elements), np.float32)
    padded.reshape(-1)[: x.size] = x
    blocks = np.asarray(quantize_gguf(jnp.asarray(padded), qtype).blocks)
    blocks = blocks[: x.size // form.elements].reshape(-1)
    return blocks, _decoded(blocks, qtype, piece)[: x.size]
