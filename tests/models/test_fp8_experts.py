"""Experts of a mixture that a loader rounds to 8 bits, and prompts that multiply so."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkern import FP8Tensor, dequantize
from jaxkern.models import load
from jaxkern.models.decoder import hidden_states, logits
from jaxkern.models.weight_reader import choose_policy
from tests.models.tiny_gguf import write_tiny_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = GOLDEN / "transformers_hybrids"


@jax.jit(static_argnums=0)
def forward(config, weights, tokens):
    x, _ = hidden_states(config, weights, tokens[None])
    return logits(config, weights, x)[0]


def off(found, truth):
    found, truth = (np.asarray(a, np.float64) for a in (found, truth))
    return np.linalg.norm(found - truth) / np.linalg.norm(truth)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.full)]
)
def test_prompts_are_multiplied_in_8_bits(name):
    with np.load(FOLDERS / name / "golden.npz") as golden:
        tokens, truth = golden["tokens"][:16], golden["logits"][:16]
    config, weights = load(FOLDERS / name, "fp8_experts")
    assert config.expert_dtype == "float8_e4m3fn" and config.product_dtype is None
    sparse = weights.layers[0].feed_forward
    for w in (sparse.gate, sparse.up, sparse.down):
        assert isinstance(w, FP8Tensor) and w.block == (1, 0)
    _, plain = load(FOLDERS / name, "f32")
    stored = plain.layers[0].feed_forward
    for w, exact in ((sparse.gate, stored.gate), (sparse.down, stored.down)):
        assert w.shape == exact.shape and off(dequantize(w), exact) < 0.04
    found = forward(config, weights, tokens)
    decoded = forward(replace(config, expert_dtype=None), weights, tokens)
    program = str(jax.make_jaxpr(forward, static_argnums=0)(config, weights, tokens))
    assert "scaled_grouped_matmul" in program and "swiglu_rows_fp8" in program
    assert off(decoded, truth) < 0.05 and 1e-3 < off(found, decoded) < 0.05


def test_it_is_asked_for():
    policy, reason = choose_policy(object(), "fp8_experts")
    assert (policy, reason) == ("fp8_experts", "asked for")
    config, _ = load(FOLDERS / "qwen3_moe", "bf16")
    assert config.expert_dtype is None


def test_what_would_lose_more_or_has_no_experts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="takes those in e4m3fn with scales of whole"):
        load(GOLDEN / "quantized_folders" / "fp8", "fp8_experts")
    with pytest.raises(ValueError, match="is MXFP4: weights='fp8_experts' rounds"):
        load(FOLDERS / "gpt_oss_mxfp4", "fp8_experts")
    path = write_tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="load: weights='fp8_experts' is for experts"):
        load(path, "fp8_experts")
