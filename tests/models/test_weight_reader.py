"""How the reader keeps experts of a GGUF file."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    AffineTensor,
    GGUFTensor,
    InterleavedTensor,
    MicroscaledTensor,
    dequantize,
)
from jaxkern.formats.gguf import read_gguf
from jaxkern.models.loader import load_file
from jaxkern.models.packed_parts import in_tiles_of
from jaxkern.models.weight_reader import WeightReader
from jaxkern.primitives.quant.microscaled_tensor import MICROSCALED
from tests.models.tiny_gguf import write_tiny_gguf

NAME = "blk.0.ffn_gate_exps.weight"


def file_of(path, f, qtype):
    """A file of three experts, and these decoded."""
    w = np.random.default_rng(0).standard_normal((3, f, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(w, qtype)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tensor(NAME, blocks, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path), gguf.quants.dequantize(blocks, qtype)


@pytest.mark.parametrize(
    "f, qtype, kind",
    [
        (32, gguf.GGMLQuantizationType.Q8_0, InterleavedTensor),
        (24, gguf.GGMLQuantizationType.Q8_0, GGUFTensor),  # no whole tiles of 16 rows
        (32, gguf.GGMLQuantizationType.Q4_0, GGUFTensor),  # not of this GPU's formats
    ],
)
def test_experts_lie_as_a_gpu_reads_them(f, qtype, kind, tmp_path, monkeypatch):
    file, values = file_of(tmp_path / "experts.gguf", f, qtype)
    monkeypatch.setattr("jaxkern.models.weight_reader.gpu_formats", lambda: {"Q8_0"})
    w = WeightReader(file, {NAME: (3, f, 64)}, "packed").experts(NAME)
    assert isinstance(w, kind) and w.shape == (3, f, 64)
    np.testing.assert_array_equal(dequantize(w), values)


def test_experts_stay_as_in_the_file_without_a_gpu(tmp_path):
    q8 = gguf.GGMLQuantizationType.Q8_0
    file, values = file_of(tmp_path / "experts.gguf", 32, q8)
    w = WeightReader(file, {NAME: (3, 32, 64)}, "packed").experts(NAME)
    if jax.default_backend() == "cpu":
        assert isinstance(w, GGUFTensor)
    np.testing.assert_array_equal(dequantize(w), values)


@pytest.mark.parametrize("qtype, kind", [("Q4_0", AffineTensor), ("MXFP4", GGUFTensor)])
def test_affine_experts_are_those_of_the_file(qtype, kind, tmp_path):
    """Where that format holds them; others stay blocks."""
    qtype = gguf.GGMLQuantizationType[qtype]
    file, values = file_of(tmp_path / "experts.gguf", 32, qtype)
    w = WeightReader(file, {NAME: (3, 32, 64)}, "affine").experts(NAME)
    assert isinstance(w, kind)
    np.testing.assert_array_equal(dequantize(w), values)


def test_affine_matrices_are_those_of_the_file(tmp_path):
    """Side by side where their codes are as wide; what is dense stays so."""
    file = read_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama", tied=True))
    config, weights = load_file(file, "affine")
    assert (config.dtype, config.product_dtype) == ("float32", None)
    query_key, value = weights.layers[1].qkv
    stored = [file.load(f"blk.1.attn_{name}.weight") for name in "qk"]
    expected = np.concatenate([dequantize(w) for w in stored])
    assert isinstance(query_key, AffineTensor) and value.dtype == np.float16
    np.testing.assert_array_equal(dequantize(query_key), expected)
    table = file.load("token_embd.weight")
    assert weights.output == (weights.embedding,)
    np.testing.assert_array_equal(dequantize(weights.embedding), dequantize(table))


@pytest.mark.parametrize(
    "format, shape, kind",
    [
        ("mxfp4", (16, 256), InterleavedTensor),
        ("nvfp4", (32, 512), InterleavedTensor),
        ("mxfp4", (24, 256), MicroscaledTensor),  # no whole tiles of 16 rows
        ("mxfp4", (16, 288), MicroscaledTensor),  # no whole steps of 256 columns
        ("mxfp8", (16, 256), MicroscaledTensor),  # no kernel of tiles
    ],
)
def test_matrices_of_folders_lie_as_a_gpu_reads_them(format, shape, kind):
    form, (f, d) = MICROSCALED[format], shape
    codes = np.full((f, d * form.bits // 8), 0x2A, np.uint8)
    scales = np.full((f, d // form.group_size), 0x3C, np.uint8)
    w = MicroscaledTensor(jnp.asarray(codes), jnp.asarray(scales), format=format)
    formats = {"MXFP4", "NVFP4_256"}
    assert isinstance(in_tiles_of(w, formats), kind)
    assert in_tiles_of(w, ()) is w
    if format == "mxfp4":  # blocks have no scale that is NaN
        none = dataclasses.replace(w, scales=w.scales.at[3, 1].set(255))
        assert in_tiles_of(none, formats) is none
