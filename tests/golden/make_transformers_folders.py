"""Tiny random models as `transformers` saves them, and the logits that it computes.

    pip install torch transformers && python -m tests.golden.make_transformers_folders

writes a folder for each model under `tests/golden/transformers/` (one of them in
shards), and `transformers_logits.npz`: the tokens `[t]`, and for each model the logits
`[t, vocabulary]` in float32 from the weights as they were saved.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.golden.tiny_sizes import SIZES

HERE = Path(__file__).parent
FOLDERS = HERE / "transformers"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "beta_fast": 8.0}
YARN |= {"beta_slow": 2.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "llama3_biases": ("llama", {"rope_parameters": LLAMA3, **BIASES}, torch.float32),
    "llama_linear": ("llama", {"rope_parameters": LINEAR}, torch.bfloat16),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}, torch.bfloat16),
    "qwen3_tied": (
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True},
        torch.float16,
    ),
}
SHARDED = "llama_linear"


def main() -> None:
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 40)
    arrays = {"tokens": tokens.astype(np.int32)}
    shutil.rmtree(FOLDERS, ignore_errors=True)
    for name, (kind, options, dtype) in MODELS.items():
        config = AutoConfig.for_model(
            kind, **{"tie_word_embeddings": False, **SIZES, **options}
        )
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        for key, value in model.named_parameters():  # else 0 and 1: nothing to see
            if key.endswith("bias") or "norm" in key:
                value.data.add_(0.3 * torch.randn_like(value))
        size = "30KB" if name == SHARDED else "1GB"
        model.save_pretrained(FOLDERS / name, max_shard_size=size)
        (FOLDERS / name / "generation_config.json").unlink(missing_ok=True)
        model = AutoModelForCausalLM.from_pretrained(
            FOLDERS / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            arrays[name] = model(torch.tensor(tokens)[None]).logits[0].numpy()
        print(name, arrays[name].std())
    np.savez_compressed(HERE / "transformers_logits.npz", **arrays)


if __name__ == "__main__":
    main()
