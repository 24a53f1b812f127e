"""GGUF files of drawn models say what `drawn_models` says, in sizes that are small."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.drawn_gguf import write_drawn_gguf
from benchmarks.drawn_models import published
from benchmarks.gpu_llama_cpp import line_of, llama_bench
from jaxkern import YarnScaling
from jaxkern.formats.gguf import read_gguf
from jaxkern.models import load
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.mixers.delta_net import DeltaNet
from jaxkern.train.new_model import new_model

SMALL = {"hidden_size": 64, "vocab_size": 96, "initializer_range": 0.2}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
MIXTURE = {"num_experts": 16, "moe_intermediate_size": 32}
MIXTURE |= {"shared_expert_intermediate_size": 48}
HYBRID = published("Qwen3.6-35B-A3B", 4) | SMALL
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
DENSE = {key: value for key, value in HYBRID.items() if "expert" not in key}
DENSE |= {"model_type": "qwen3_5_text", "intermediate_size": 96}
del DENSE["moe_intermediate_size"]
GEMMA4 = {
    "intermediate_size": 48,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 96,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
}
GPT_OSS = {"intermediate_size": 32, "num_local_experts": 8, "sliding_window": 6}
IN_BLOCKS = {"hidden_size": 256, "num_experts": 16, "moe_intermediate_size": 256}
MODELS = {  # kind of the matrices, and config.json, by the architecture
    "gemma4": ("F32", published("gemma-4-E2B", 10) | SMALL | GEMMA4),
    "qwen35moe": ("F32", HYBRID | MIXTURE),
    "qwen35": ("F32", DENSE),
    "qwen3next": (
        "F32",
        HYBRID | MIXTURE | {"model_type": "qwen3_next", "norm_topk_prob": True},
    ),
    "gpt-oss": ("mxfp4", published("gpt-oss-20b", 2) | SMALL | GPT_OSS),
    "qwen3moe": ("Q4_K", published("Qwen3-30B-A3B", 1) | SMALL | IN_BLOCKS),
}


def as_in_gguf(mixer):
    """Value heads lie in turns if not by key head; what YaRN multiplies is said."""
    if isinstance(mixer, DeltaNet):
        by_head = mixer.by_head
        return replace(mixer, gates_by_head=by_head, in_turns=not by_head)
    turns = mixer.rotation
    if isinstance(turns.scaling, YarnScaling):
        factor = 0.1 * math.log(turns.scaling.factor) + 1
        turns = replace(turns, scaling=replace(turns.scaling, attention_factor=factor))
    return replace(mixer, rotation=turns)


@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_the_model(name, tmp_path):
    kind, keys = MODELS[name]
    path = tmp_path / f"{name}.gguf"
    write_drawn_gguf(path, keys, kind)
    config, weights = load(path, "f32")
    expected = new_model(keys, seed=0).config
    assert config.eps == np.float32(expected.eps)
    same = {"architecture": config.architecture, "eps": config.eps}
    if isinstance(expected, DecoderConfig):
        same["mixers"] = tuple(map(as_in_gguf, expected.mixers))
    assert config == replace(expected, **same)
    assert all(np.isfinite(w).all() for w in jax.tree.leaves(weights))
    blocks = {info.qtype for info in read_gguf(path).tensors.values()} - {"F32"}
    found = {"mxfp4": {"BF16", "MXFP4"}, "Q4_K": {"BF16", "Q4_K"}, "F32": set()}
    assert blocks == found[kind]


TOOL = """#!{python}
import json, sys
rest = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if rest["-m"] == "none":
    sys.exit("no such file")
about = dict(model_size=12.5e9, backends="CUDA", gpu_info="NVIDIA H100", cpu_info="C")
tests = [
    dict(about, n_prompt=p, n_gen=n, n_depth=d, avg_ts=p + 2 * n + d, stddev_ts=0.5)
    for d in map(int, rest["-d"].split(","))
    for p, n in ((int(rest["-p"]), 0), (0, int(rest["-n"])))
]
print(json.dumps(tests))
"""


def test_what_llama_bench_says(tmp_path):
    tool = tmp_path / "llama-bench"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    tests = llama_bench(str(tool), tmp_path / "m.gguf", 32, 8)
    assert line_of(tests, 32) == (
        "decode 48.0 tokens/s (+- 0.5), prefill 32 (+- 0), 12.5 GB, CUDA, NVIDIA H100"
    )
    with pytest.raises(RuntimeError, match=r"-p 32 -n 8 .* no such file"):
        llama_bench(str(tool), Path("none"), 32, 8)
