"""Tiny random dense models as `transformers` saves them, and what it computes.

    pip install torch transformers && python -m tests.golden.make_transformers_dense

writes a folder for each model under `tests/golden/transformers_dense/`, its weights in
bfloat16, with a `golden.npz`, all computed in float32 from the weights as saved:

    tokens          [t] int32
    logits          [t, vocabulary]
    greedy          [32] int32, the likeliest tokens behind the first PROMPT of `tokens`
    embedding_grad  [vocabulary, d] of the mean cross entropy of tokens 1 ... t
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.golden import tiny_sizes

FOLDERS = Path(__file__).parent / "transformers_dense"
PROMPT = 9
SIZES = tiny_sizes.SIZES | {
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "beta_fast": 8.0}
YARN |= {"beta_slow": 2.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
GEMMA |= {"tie_word_embeddings": True, "initializer_range": 0.2}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
}
MODELS = {
    "llama": ("llama", {}),
    "mistral_window": ("mistral", {"sliding_window": 6, "head_dim": 12}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {}),
    "olmo3_yarn": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 20, "rope_parameters": PLAIN}),
    "phi3_longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 4,
                **FACTORS,
            },
        },
    ),
    "phi3_shortrope": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 128,
                **FACTORS,
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN},
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        },
    ),
    "gemma4_keys_as_values": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "layer_types": [SLIDING, SLIDING, FULL],
        },
    ),
    "gemma4_experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "layer_types": [SLIDING, FULL],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "gemma4_images": (
        "gemma4",
        {
            "text_config": {
                **GEMMA4,
                "num_hidden_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 96,
                "layer_types": [SLIDING, FULL],
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 16,
            },
            "audio_config": None,
        },
    ),
}


def main(names: list[str]) -> None:
    for seed, (name, (kind, options)) in enumerate(MODELS.items()):
        if names and name not in names:
            continue
        torch.manual_seed(seed)
        tokens = np.random.default_rng(seed).integers(3, SIZES["vocab_size"], 40)
        folder = FOLDERS / name
        shutil.rmtree(folder, ignore_errors=True)
        if "text_config" in options:
            options = {**options, "text_config": {**SIZES, **options["text_config"]}}
            config = AutoConfig.for_model(kind, **options)
        else:
            config = AutoConfig.for_model(kind, **{**SIZES, **options})
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        stored = *model.named_parameters(), *model.named_buffers()
        for key, value in stored:  # else 0 and 1: nothing to see
            if "norm" in key or "scalar" in key or key.endswith(("bias", "scale")):
                value.data.add_(0.3 * torch.randn_like(value))
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        np.savez_compressed(folder / "golden.npz", **computed(model, tokens))
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(name, size)


def computed(model, tokens: np.ndarray) -> dict[str, np.ndarray]:
    ids = torch.tensor(tokens)[None]
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    text = ids[:, :PROMPT]
    with torch.no_grad():
        for _ in range(32):
            after = model(text, use_cache=False).logits[:, -1]
            first, second = after[0].topk(2).values
            assert first - second > 2e-4, "too close to call"
            text = torch.cat([text, after.argmax(-1)[:, None]], dim=1)
    return {
        "tokens": tokens.astype(np.int32),
        "logits": logits[0].detach().numpy(),
        "greedy": text[0, PROMPT:].numpy().astype(np.int32),
        "embedding_grad": model.get_input_embeddings().weight.grad.numpy(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
