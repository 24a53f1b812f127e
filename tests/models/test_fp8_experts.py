"""Experts of a mixture that a loader rounds to 8 bits, and prompts that multiply so."""

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkern import FP8Tensor, dequantize, quantize_fp8
from jaxkern.formats.safetensors import read_safetensors_folder
from jaxkern.models import load
from jaxkern.models.decoder import hidden_states, logits
from jaxkern.models.expert_slots import joins
from jaxkern.models.weight_reader import WeightReader, choose_policy
from jaxkern.train.jobs import adapter_job
from jaxkern.train.run_config import Lora, RunConfig
from tests.models.tiny_gguf import write_tiny_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = GOLDEN / "transformers_hybrids"
# of random weights, of which bfloat16 alone is off by 0.010 and 0.060
OFF = {"qwen3_moe": 0.05, "gpt_oss": 0.2}


@jax.jit(static_argnums=0)
def forward(config, weights, tokens):
    x, _ = hidden_states(config, weights, tokens[None])
    return logits(config, weights, x)[0]


def off(found, truth):
    found, truth = (np.asarray(a, np.float64) for a in (found, truth))
    return np.linalg.norm(found - truth) / np.linalg.norm(truth)


@pytest.mark.full
def test_those_of_a_file_with_scales_of_rows_stay():
    """Of its blocks of 128 columns the rows here have no more than one."""
    folder = GOLDEN / "quantized_folders" / "fp8"
    config, weights = load(folder, "fp8_experts")
    _, packed = load(folder, "packed")
    layers = zip(weights.layers, packed.layers, strict=True)
    for w, stored in ((a.feed_forward, b.feed_forward) for a, b in layers):
        if hasattr(w, "router"):
            for name in ("gate", "up", "down"):
                jax.tree.map(
                    np.testing.assert_array_equal,
                    getattr(w, name),
                    getattr(stored, name),
                )
    with np.load(folder / "golden.npz") as golden:
        assert off(forward(config, weights, golden["tokens"]), golden["logits"]) < 0.1


@pytest.mark.parametrize(
    "name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.full)]
)
def test_prompts_are_multiplied_in_8_bits(name):
    with np.load(FOLDERS / name / "golden.npz") as golden:
        tokens, truth = golden["tokens"][:16], golden["logits"][:16]
    config, weights = load(FOLDERS / name, "fp8_experts")
    assert config.expert_dtype == "float8_e4m3fn" and config.product_dtype is None
    sparse = weights.layers[0].feed_forward
    _, plain = load(FOLDERS / name, "f32")
    stored = plain.layers[0].feed_forward
    gate_up = np.concatenate([stored.gate, stored.up], axis=1)
    assert sparse.up is None and sparse.up_bias is None
    for w, exact in ((sparse.gate, gate_up), (sparse.down, stored.down)):
        assert isinstance(w, FP8Tensor) and w.block == (1, 0)
        assert w.shape == exact.shape and off(dequantize(w), exact) < 0.04
    if stored.gate_bias is not None:
        both = np.concatenate([stored.gate_bias, stored.up_bias], axis=1)
        np.testing.assert_array_equal(sparse.gate_bias, both)
    found = forward(config, weights, tokens)
    decoded = forward(replace(config, expert_dtype=None), weights, tokens)
    program = str(jax.make_jaxpr(forward, static_argnums=0)(config, weights, tokens))
    assert "scaled_grouped_matmul" in program and "swiglu_rows_fp8" in program
    assert off(decoded, truth) < OFF[name] and 1e-3 < off(found, decoded) < OFF[name]


@pytest.mark.parametrize("width", [16, pytest.param(24, marks=pytest.mark.full)])
def test_one_that_all_tokens_pass_is_rounded_if_it_is_as_wide(tmp_path, width):
    """At decode it is one slot more then; of another width it stays bfloat16."""
    folder = shutil.copytree(FOLDERS / "qwen3_next", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["moe_intermediate_size"] == 16
    config["shared_expert_intermediate_size"] = width
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name, w in tensors.items():
        if ".shared_expert." in name:
            cut = w[:, :width] if "down" in name else w[:width]
            tensors[name] = np.ascontiguousarray(cut)
    save_file(tensors, folder / "model.safetensors")
    config, weights = load(folder, "fp8_experts")
    plain = load(folder, "f32")
    sparse = weights.layers[0].feed_forward
    [both], [down] = sparse.shared
    assert isinstance(both, FP8Tensor) == isinstance(down, FP8Tensor) == (width == 16)
    assert joins(sparse) == (width == 16)
    tokens = np.arange(12, dtype=np.int32)
    truth = forward(*plain, tokens)
    assert off(forward(config, weights, tokens), truth) < 0.2


def test_it_is_asked_for():
    policy, reason = choose_policy(object(), "fp8_experts")
    assert (policy, reason) == ("fp8_experts", "asked for")
    config, _ = load(FOLDERS / "qwen3_moe", "bf16")
    assert config.expert_dtype is None


def in_blocks(codes, scales, powers):
    """Blocks of 128 in blocks of 16: the same weights, every second scale twice as
    large if nothing is lost by it; or rounded anew, each block by its largest."""
    nf, nd = (n // 16 for n in codes.shape)
    blocks = codes.astype(np.float32).reshape(nf, 16, nd, 16).swapaxes(1, 2)
    found = scales.repeat(8, 0).repeat(8, 1)[:nf, :nd]
    if powers:
        half = (blocks / 2).astype(codes.dtype).astype(np.float32)
        twice = (half == blocks / 2).all((2, 3)) & (np.indices((nf, nd)).sum(0) % 2 > 0)
        factor = np.where(twice, 2, 1)
    else:
        factor = np.abs(blocks).max((2, 3)) / 448
    blocks = (blocks / factor[..., None, None]).swapaxes(1, 2).reshape(codes.shape)
    return blocks.astype(codes.dtype), (found * factor).astype(np.float32)


def folder_of_blocks(folder, powers):
    """The golden folder of blocks of 128, where a row of experts has one of them."""
    shutil.copytree(GOLDEN / "quantized_folders" / "fp8", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [16, 16]
    (folder / "config.json").write_text(json.dumps(config))
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, content = json.loads(data[8 : 8 + size]), data[8 + size :]

    def raw(name, dtype=np.uint8):
        begin, end = header[name]["data_offsets"]
        return np.frombuffer(content[begin:end], dtype)

    def array(name, dtype):
        return raw(name, dtype).reshape(header[name]["shape"])

    written = {n: raw(n) for n in header if n != "__metadata__"}
    for name in [n for n in header if f"{n}_scale_inv" in header]:
        codes = array(name, ml_dtypes.float8_e4m3fn)
        scales = array(f"{name}_scale_inv", np.float32)
        found = in_blocks(codes, scales, powers)
        written[name], written[f"{name}_scale_inv"] = found
    content = b""
    for name, x in written.items():
        entry, end = header[name], len(content) + x.nbytes
        entry["data_offsets"] = [len(content), end]
        if name.endswith("_scale_inv"):
            entry["shape"] = x.shape
        content += x.tobytes()
    head = json.dumps(header).encode()
    data = struct.pack("<Q", len(head)) + head + content
    (folder / "model.safetensors").write_bytes(data)
    return folder


@pytest.mark.parametrize("powers", [True, False], ids=["powers_of_two", "any_scales"])
def test_those_of_blocks_become_rows(tmp_path, caplog, powers):
    folder = folder_of_blocks(tmp_path / "model", powers)
    config, weights = load(folder, "fp8_experts")
    decoded, plain = load(folder, "f32")
    with np.load(folder / "golden.npz") as golden:
        tokens, truth = golden["tokens"], golden["logits"]
    if powers:  # the weights are those whose logits `transformers` gave
        found = forward(decoded, plain, tokens)
        np.testing.assert_allclose(found, truth, rtol=0, atol=1e-4)
    sparse, exact = (w.layers[0].feed_forward for w in (weights, plain))
    assert sparse.up is None and sparse.gate.block == sparse.down.block == (1, 0)
    stored = [np.concatenate([exact.gate, exact.up], axis=1), exact.down]
    kept = [dequantize(w) for w in (sparse.gate, sparse.down)]
    lost = off(*(np.concatenate([np.ravel(a) for a in w]) for w in (kept, stored)))
    if powers:
        assert lost < 1e-6 and not caplog.text
    else:  # 2.65 % is the rounding of any number; these were rounded by a like scale
        assert 0.015 < lost < 0.0265
        assert "were requantised from blocks to rows" in caplog.text
        assert f"off by {100 * lost:.2g} % of their norm" in caplog.text
    truth = forward(decoded, plain, tokens)
    assert off(forward(config, weights, tokens), truth) < 0.1


def test_what_would_lose_more_or_has_no_experts_is_refused(tmp_path):
    packed = GOLDEN / "quantized_folders" / "compressed_mixed"
    with pytest.raises(
        ValueError, match=r"MicroscaledTensor\(nvfp4.*takes those in e4m3"
    ):
        load(packed, "fp8_experts")
    reader = SimpleNamespace(file=read_safetensors_folder(packed))
    wide = quantize_fp8(jnp.ones((32, 256)), block=(32, 128), format="e5m2")
    with pytest.raises(ValueError, match="takes those in e4m3fn"):
        WeightReader.stored_in_8_bits(cast(Any, reader), "output.weight", [wide])
    with pytest.raises(ValueError, match="is MXFP4: weights='fp8_experts' rounds"):
        load(FOLDERS / "gpt_oss_mxfp4", "fp8_experts")
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="llama")
    with pytest.raises(ValueError, match="load: weights='fp8_experts' is for experts"):
        load(path, "fp8_experts")


def test_adapters_are_not_trained_with_it():
    lora = Lora(weights="fp8_experts")
    with pytest.raises(ValueError, match=r"lora\.weights: fp8_experts is not"):
        adapter_job(RunConfig(), lora, str(FOLDERS / "qwen3_moe"), None)
