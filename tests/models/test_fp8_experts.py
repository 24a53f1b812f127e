"""Experts of a mixture that a loader rounds to 8 bits, and prompts that multiply so."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import FP8Tensor, dequantize, quantize_fp8
from jaxkern.formats.safetensors import read_safetensors_folder
from jaxkern.models import load
from jaxkern.models.decoder import hidden_states, logits
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


def test_it_is_asked_for():
    policy, reason = choose_policy(object(), "fp8_experts")
    assert (policy, reason) == ("fp8_experts", "asked for")
    config, _ = load(FOLDERS / "qwen3_moe", "bf16")
    assert config.expert_dtype is None


def test_what_would_lose_more_or_has_no_experts_is_refused(tmp_path):
    packed = GOLDEN / "quantized_folders" / "compressed_mixed"
    with pytest.raises(
        ValueError, match=r"MicroscaledTensor\(nvfp4.*takes those in e4m3"
    ):
        load(packed, "fp8_experts")
    reader = SimpleNamespace(file=read_safetensors_folder(packed))
    blocks = quantize_fp8(jnp.ones((32, 256)), block=(32, 128))
    with pytest.raises(ValueError, match="in e4m3fn with scales of whole rows"):
        WeightReader.stored_in_8_bits(cast(Any, reader), "output.weight", [blocks])
    with pytest.raises(ValueError, match="is MXFP4: weights='fp8_experts' rounds"):
        load(FOLDERS / "gpt_oss_mxfp4", "fp8_experts")
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="llama")
    with pytest.raises(ValueError, match="load: weights='fp8_experts' is for experts"):
        load(path, "fp8_experts")


def test_adapters_are_not_trained_with_it():
    lora = Lora(weights="fp8_experts")
    with pytest.raises(ValueError, match=r"lora\.weights: fp8_experts is not"):
        adapter_job(RunConfig(), lora, str(FOLDERS / "qwen3_moe"), None)
