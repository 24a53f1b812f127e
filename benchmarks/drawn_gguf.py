"""GGUF files of the models of `drawn_models`: what another program reads and measures.

Names, shapes and keys are those that llama.cpp's converter gives such a model; there is
no tokenizer. Matrices are one pool of random blocks over and over, so a file is written
as fast as the disk takes it; norms and small vectors are those of a new model.
"""

import functools
import zlib
from collections.abc import Mapping
from os import PathLike
from typing import Any

import gguf
import numpy as np

from benchmarks.drawn_models import SCALES
from benchmarks.gguf_keys import gguf_keys
from jaxkern.formats.gguf_writer import new_file, write_tensors
from jaxkern.models.decoder_files import tensors_of
from jaxkern.models.gemma4 import Gemma4Config
from jaxkern.models.gemma4_gguf import FACTORS
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.qwen3_next_files import OF_GGUF
from jaxkern.models.registry import Described
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS
from jaxkern.train.new_model import NewModel, first_weights, new_model

POOL = 2**25  # bytes of random blocks
SMALL = 0.02  # standard deviation of bfloat16
ARCHITECTURES = {  # of GGUF, by model_type; and where the weights of a layer are
    "gemma4_text": ("gemma4", None),
    "gpt_oss": ("gpt-oss", Layout(ffn_norm="post_attention_norm")),
    "qwen3_5_moe_text": ("qwen35moe", OF_GGUF),
    "qwen3_5_text": ("qwen35", OF_GGUF),
    "qwen3_next": ("qwen3next", OF_GGUF),
    "qwen3_moe": ("qwen3moe", Layout()),
}


def write_drawn_gguf(
    path: str | PathLike[str], keys: Mapping[str, Any], kind: str
) -> None:
    """Writes the model that the keys of a config.json describe.

    Args:
      path: where nothing is yet.
      keys: of a model type in `ARCHITECTURES`.
      kind: of matrices, as `drawn_model` takes it: "F32", "bf16", a block format, or
        "mxfp4" for the experts alone, beside bfloat16.

    Raises:
      ValueError: another kind or model type.
      FileExistsError: something is there.
    """
    known = ("F32", "bf16", "mxfp4", *SCALES)
    if kind not in known:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(known)}.")
    if keys["model_type"] not in ARCHITECTURES:
        raise ValueError(
            f"model_type is {keys['model_type']!r}, known are "
            f"{', '.join(ARCHITECTURES)}."
        )
    model = new_model(keys, seed=0)
    arch, _ = ARCHITECTURES[keys["model_type"]]
    shapes = gguf_shapes(model, keys)
    qtypes = {name: qtype_of(name, shape, kind) for name, shape in shapes.items()}

    def blocks_of(name: str) -> np.ndarray:
        if qtypes[name] == "F32":
            return plain(model, name, shapes[name])
        return pooled(shapes[name], qtypes[name])

    with new_file(path) as temporary:
        writer = gguf.GGUFWriter(temporary, arch)
        try:
            for key, value in keys_of(model, shapes).items():
                add_key(writer, f"{arch}.{key}", value)
            writer.add_tokenizer_model("no_vocab")
            write_tensors(writer, shapes, qtypes, blocks_of)
        finally:
            writer.close()


def gguf_shapes(
    model: Described, keys: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the file."""
    if isinstance(model.config, Gemma4Config):
        pairs = model.config.far.head_dim // 2
        return {**model.tensors, FACTORS: (pairs,)}
    _, layout = ARCHITECTURES[keys["model_type"]]
    assert layout is not None
    tied = keys["tie_word_embeddings"]
    tensors = tensors_of(model.config, layout, tied=tied)
    return {name: tensor.shape for name, tensor in tensors.items() if tensor.used}


def keys_of(model: Described, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Those of the config, and what the tensors say too."""
    keys = gguf_keys(model.config) | {"vocab_size": model.config.vocabulary}
    if isinstance(model.config, Gemma4Config):
        layers = range(model.config.layers)
        widths = [shapes[f"blk.{i}.ffn_down.weight"][1] for i in layers]
        keys["feed_forward_length"] = widths
    return keys


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """With the type of the value."""
    if isinstance(value, list):
        return writer.add_array(key, value)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


def qtype_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """The format of a tensor: float32 for routers and what is no product."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    product = name.endswith(".weight") and len(shape) > 1
    if kind == "F32" or not product or part.startswith(("ffn_gate_inp", "ssm_conv1d")):
        return "F32"
    if kind == "mxfp4":
        return "MXFP4" if name.endswith("_exps.weight") else "BF16"
    tables = ("token_embd.weight", "per_layer_token_embd.weight")
    return "BF16" if kind == "bf16" or name in tables else kind


def plain(model: Described, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of float32, as a new model begins."""
    if name == FACTORS:  # the other pairs of a long head stand still
        turns = np.arange(*shape) < model.config.far.rotated_pairs
        return np.where(turns, 1, 1e30).astype(np.float32)
    assert isinstance(model.file, NewModel)
    draws = np.random.default_rng(zlib.crc32(name.encode()))
    rates = name.endswith(".ssm_a")
    stored = f"{name}_log" if rates else name
    w = first_weights(stored, shape, draws, model.file.deviation, model.file.layers)
    return -np.exp(w) if rates else w


def pooled(shape: tuple[int, ...], qtype: str) -> np.ndarray:
    """The pool over and over, as bytes."""
    form = BLOCK_FORMATS[qtype]
    rows = (*shape[:-1], shape[-1] // form.elements * form.bytes)
    return np.resize(pool_of(qtype), rows)


@functools.cache
def pool_of(qtype: str) -> np.ndarray:
    """Random blocks, with scales of their own: uint8."""
    draws = np.random.default_rng(0)
    if qtype == "BF16":
        w = SMALL * draws.standard_normal(POOL // 2, np.float32)
        return w.view(np.uint16)[1::2].copy().view(np.uint8)  # the upper halves
    size = BLOCK_FORMATS[qtype].bytes
    blocks = draws.integers(0, 256, (POOL // size, size), np.uint8)
    if qtype == "MXFP4":
        blocks[:, 0] = draws.integers(118, 122, len(blocks), np.uint8)
        return blocks.reshape(-1)
    for at, scale in SCALES[qtype].items():
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(-1)
