"""Tiny random mixtures and hybrids as `transformers` saves them, and what it computes.

    pip install torch transformers accelerate
    python -m tests.golden.make_transformers_hybrids

writes a folder for each model under `tests/golden/transformers_hybrids/`, its weights
in bfloat16, with a `golden.npz`, all computed in float32 from the weights as saved:

    tokens          [t] int32
    logits          [t, vocabulary]
    greedy          [32] int32, the likeliest tokens behind the first PROMPT of `tokens`
    embedding_grad  [vocabulary, d] of the mean cross entropy of tokens 1 ... t
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4ForCausalLM,
)

from tests.golden import tiny_sizes

FOLDERS = Path(__file__).parent / "transformers_hybrids"
PROMPT = 9
SIZES = tiny_sizes.SIZES | {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-3,  # else the norm behind a first q.k near 0 amplifies rounding
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
}
SHARED = {"shared_expert_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "beta_fast": 8.0}
YARN |= {"beta_slow": 2.0, "original_max_position_embeddings": 64}
DEEP_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
GROWING |= {"original_max_position_embeddings": 16, "max_position_embeddings": 256}
MINISTRAL = {"head_dim": 16, "rope_parameters": GROWING, "num_hidden_layers": 1}
MINISTRAL |= {"pad_token_id": 0}  # whose row has no gradient
MISTRAL = LATENT | {"q_lora_rank": 20, "first_k_dense_replace": 0} | MINISTRAL
del MISTRAL["head_dim"]
SCALES = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "time_step_min": 0.2,  # some steps would be smaller
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "rescale_prenorm_residual": False,
}
FALCON = {
    "head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    "mlp_multipliers": [1.5, 0.6],
}
MODELS = {
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "hidden_size": 64,
            "intermediate_size": 32,
            "head_dim": 16,
            "sliding_window": 6,
            "rope_parameters": YARN | {"truncate": False},
            "swiglu_limit": 1.5,
        },
    ),
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS | SHARED | {"norm_topk_prob": True}),
    "qwen3_5_text": ("qwen3_5_text", DELTA),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", DELTA | EXPERTS | SHARED),
    "qwen3_5": ("qwen3_5", {"text_config": DELTA, "vision_config": VISION}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {"text_config": DELTA | EXPERTS | SHARED, "vision_config": VISION},
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "intermediate_size": 60,
            "block_multiple_of": 16,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}
        | {"rope_parameters": DEEP_YARN, "routed_scaling_factor": 1.5},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT | {"q_lora_rank": 20, "rope_parameters": DEEP_YARN | {"mscale": 1.0}},
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "num_experts_per_tok": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {
            "head_dim": 16,
            "intermediate_size": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": HALF,
        },
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h_latent": (
        "nemotron_h",
        NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "moe"],
            "moe_latent_size": 64,
            "time_step_min": 1e-9,  # none is smaller
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "falcon_h1": ("falcon_h1", FALCON),
    "falcon_h1_norm": (
        "falcon_h1",
        FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 16},
    ),
    "olmoe": (
        "olmoe",
        {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 16},
    ),
    "kimi_linear": (
        "kimi_linear",
        {key: x for key, x in LATENT.items() if key != "n_routed_experts"}
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_local_experts": 8,
            "n_shared_experts": 1,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "rms_norm_eps": 1e-3,
            "routed_scaling_factor": 1.5,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "ministral3": ("ministral3", MINISTRAL),
    "mistral4": ("mistral4", MISTRAL),
    "mistral3": (
        "mistral3",
        {"text_config": MISTRAL | {"model_type": "mistral4"}, "vision_config": PIXTRAL},
    ),
    "granite": ("granite", SCALES),
    "granitemoe": (
        "granitemoe",
        SCALES
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 16},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
            "shared_intermediate_size": 24,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
        }
        | SCALES,
    ),
}  # fmt: skip

SEEDS = {
    "deepseek_v2": 1,  # with 0 its answer is one token again and again
    "falcon_h1_norm": 1,  # with 0 two tokens are too close to call
}


def randomise(model: torch.nn.Module) -> None:
    """Random numbers for what begins as 0, 1 or the same in every model."""
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        part = name.rpartition(".")[2]
        noise = torch.randn_like(x.float()).to(x.dtype)
        if part in ("bias", "sinks", "dt_bias", "e_score_correction_bias", "D"):
            x.data.add_(0.3 * noise)
        elif "norm" in name or part.endswith("_bias"):
            x.data.add_(0.3 * noise)
        elif part == "A_log":
            x.data.copy_(0.5 * noise)
        elif "conv" in name and x.ndim == 3:
            x.data.copy_(0.5 * noise)


def packed_experts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Makes gpt-oss's experts MXFP4 numbers, and gives the tensors of such a file."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    tensors = {}
    for name, x in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        e, d, f = x.shape
        codes = torch.randint(0, 16, (e, f, d // 32, 32))
        scales = torch.randint(123, 127, (e, f, d // 32))
        values = table[codes] * torch.exp2(scales[..., None] - 127.0)
        x.data.copy_(values.reshape(e, f, d).transpose(1, 2))
        blocks = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    return tensors


def save_packed(folder: Path, packed: dict[str, torch.Tensor]) -> Path:
    """The folder once more with experts of MXFP4, as the published files are."""
    other = folder.with_name(f"{folder.name}_mxfp4")
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(folder, other)
    weights = load_file(folder / "model.safetensors")
    for name in packed:
        weights.pop(name.removesuffix("_blocks").removesuffix("_scales"), None)
    save_file(weights | packed, other / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    kept += ["model.embed_tokens", "lm_head"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": kept,
    }
    (other / "config.json").write_text(json.dumps(config, indent=2))
    (other / "golden.npz").unlink()  # it is that of the first folder
    return other


def class_of(kind: str, images: bool) -> Any:
    """The class that makes and reads models of this kind."""
    if kind == "mistral4":  # which no automatic class knows
        return Mistral4ForCausalLM
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def computed(folder: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """What the model of the folder gives, in float32."""
    config = json.loads((folder / "config.json").read_text())
    model = class_of(config["model_type"], "vision_config" in config)
    model = model.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    row = torch.tensor(tokens)[None]
    table = model.get_input_embeddings().weight
    logits = model(row, use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], row[0, 1:])
    (grad,) = torch.autograd.grad(loss, table)
    greedy: list[int] = []
    with torch.no_grad():
        for _ in range(32):  # by the whole text: no cache to be trusted
            text = torch.cat([row[:, :PROMPT], torch.tensor([greedy]).long()], dim=1)
            best = model(text, use_cache=False).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "too close to call"
            greedy.append(int(best.indices[0]))
    return {
        "tokens": tokens.astype(np.int32),
        "logits": logits.detach().numpy(),
        "greedy": np.array(greedy, np.int32),
        "embedding_grad": grad.numpy(),
    }


def main() -> None:
    tokens = np.random.default_rng(0).integers(3, SIZES["vocab_size"], 40)
    for name, (kind, options) in MODELS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(SEEDS.get(name, 0))
        if "text_config" in options:
            inner = {**SIZES, **options["text_config"]}
            options = {**options, "text_config": inner}
            config = AutoConfig.for_model(kind, tie_word_embeddings=False, **options)
            model = AutoModelForImageTextToText.from_config(config)
        else:
            config = AutoConfig.for_model(kind, **{**SIZES, **options})
            model = class_of(kind, images=False)
            model = getattr(model, "from_config", model)(config)
        randomise(model)
        folder = FOLDERS / name
        shutil.rmtree(folder, ignore_errors=True)
        packed = packed_experts(model) if kind == "gpt_oss" else {}
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        arrays = computed(folder, tokens)
        np.savez_compressed(folder / "golden.npz", **arrays)
        if packed:
            other = save_packed(folder, packed)
            again = computed(other, tokens)["logits"]
            assert np.abs(again - arrays["logits"]).max() < 1e-5
        print(name, arrays["logits"].std(), arrays["greedy"][:12])


if __name__ == "__main__":
    main()
