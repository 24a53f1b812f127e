"""Folders of Hugging Face with the model types `llama`, `qwen2` and `qwen3`.

Names of tensors become those of GGUF files, so that one loader serves both; the rows of
q and k lie as in the papers, in halves.
"""

import math
import re
from collections.abc import Mapping

from jaxkern import LinearScaling, Llama3Scaling, YarnScaling
from jaxkern.formats.architecture_keys import ArchitectureKeys, architecture_keys
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.models.llama import LlamaConfig
from jaxkern.primitives.rope.rope_frequencies import RopeScaling

MODEL_TYPES = ("llama", "qwen2", "qwen3")

# Keys of config.json that change nothing in the logits, and why.
HARMLESS = {
    "model_type": "read as the architecture",
    "architectures": "the class in Python",
    "torch_dtype": "the weights say their own",
    "dtype": "the weights say their own",
    "transformers_version": "who wrote it",
    "_name_or_path": "who wrote it",
    "use_cache": "how it is run",
    "pretraining_tp": "in how many parts a product was made",
    "initializer_range": "of weights before training",
    "attention_dropout": "of training",
    "bos_token_id": "of the tokenizer",
    "eos_token_id": "of the tokenizer",
    "pad_token_id": "of the tokenizer",
    "sliding_window": "only read with use_sliding_window",
    "max_window_layers": "only read with use_sliding_window",
}
WITHOUT = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0, 1),
    "rope_parameters.partial_rotary_factor": (1.0, 1),
}

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
IN_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def as_gguf(
    folder: SafetensorsFolder,
) -> tuple[LlamaConfig, SafetensorsFolder]:
    """The configuration, and the folder with the names of a GGUF file.

    Raises:
      SafetensorsError: another model type, a key of config.json that is not known, or
        one that is missing or contradicts the weights.
    """
    if folder.architecture not in MODEL_TYPES:
        raise folder.error(
            f"model_type is {folder.architecture!r}, known are {', '.join(MODEL_TYPES)}"
        )
    with architecture_keys(folder, HARMLESS, WITHOUT) as keys:
        config = _config(keys, len(folder.tensors))
        tied = keys.flag("tie_word_embeddings", False)
        expected = _expected(keys)
        width = keys.integer("intermediate_size")
    names: dict[str, str] = {}
    for stored in folder.tensors:
        if COMPUTED.fullmatch(stored) or (tied and stored == "lm_head.weight"):
            continue
        names[_gguf_name(folder, stored)] = stored
    if not tied and "output.weight" not in names:
        raise folder.error("has no tensor lm_head.weight, and ties no embeddings")
    _check_expected(folder, names, config.layers, expected)
    renamed = folder.renamed(names)
    for name, info in renamed.tensors.items():
        if name.endswith(".ffn_up.weight") and info.shape[0] != width:
            raise folder.error(
                f"tensor {renamed.called(name)} is {info.shape}, the key "
                f"intermediate_size {width}"
            )
    return config, renamed


def _gguf_name(folder: SafetensorsFolder, stored: str) -> str:
    if stored in NAMES:
        return NAMES[stored]
    match = IN_LAYER.fullmatch(stored)
    if match is None or match[2] not in LAYER_NAMES:
        raise folder.error(
            f"tensor {stored!r} has no place in a model of type {folder.architecture}"
        )
    return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def _config(keys: ArchitectureKeys, num_tensors: int) -> LlamaConfig:
    d_model, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    many = heads if keys.arch == "llama" else None  # else the default is another
    kv_heads = keys.integer("num_key_value_heads", many)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise keys.error("num_key_value_heads", f"{heads} heads cannot share them")
    head_dim = keys.integer(
        "head_dim", None if keys.arch == "qwen3" else d_model // heads
    )
    if head_dim < 2 or head_dim % 2:
        raise keys.error("head_dim", f"expected an even number, got {head_dim}")
    layers = keys.integer("num_hidden_layers")
    if not 1 <= layers <= num_tensors:
        raise keys.error("num_hidden_layers", f"the files have {num_tensors} tensors")
    for kind in keys.strings("layer_types"):
        if kind != "full_attention":
            raise keys.error("layer_types", "expected full_attention in every layer")
    context = keys.integer("max_position_embeddings")
    where = "rope_parameters" if _has(keys, "rope_parameters") else "rope_scaling"
    theta = keys.number(f"{where}.rope_theta", keys.number("rope_theta", 10000.0))
    return LlamaConfig(
        architecture=keys.arch,
        context=context,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=keys.integer("vocab_size"),
        eps=keys.number("rms_norm_eps"),
        rotary_dim=head_dim,
        theta=theta,
        pairing="neox",
        scaling=_rope_scaling(keys, where, context, theta),
    )


def _has(keys: ArchitectureKeys, key: str) -> bool:
    prefix = f"{keys.arch}.{key}."
    return any(name.startswith(prefix) for name in keys.file.metadata)


def _rope_scaling(
    keys: ArchitectureKeys, where: str, context: int, theta: float
) -> RopeScaling | None:
    """`rope_parameters`, or `rope_scaling` of older files, as transformers reads it."""
    old = keys.string(f"{where}.type", "default")
    kind = keys.string(f"{where}.rope_type", old)
    if kind == "default":
        return None
    if kind not in ("linear", "yarn", "llama3"):
        raise keys.error(
            f"{where}.rope_type", "known are default, linear, yarn and llama3"
        )
    factor = keys.number(f"{where}.factor")
    if kind == "linear":
        return LinearScaling(factor)
    original = keys.integer(f"{where}.original_max_position_embeddings", context)
    if kind == "llama3":
        low = keys.number(f"{where}.low_freq_factor")
        high = keys.number(f"{where}.high_freq_factor")
        if low >= high or original < 1:
            raise keys.error(f"{where}.low_freq_factor", f"expected less than {high}")
        return Llama3Scaling(factor, low, high, original)
    fast = keys.number(f"{where}.beta_fast", 32.0)
    slow = keys.number(f"{where}.beta_slow", 1.0)
    if fast < slow or original <= 2 * math.pi * slow or theta <= 1:
        raise keys.error(
            f"{where}.original_max_position_embeddings",
            f"YaRN from {slow} to {fast} turns needs more tokens, and a base above 1",
        )
    return YarnScaling(
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=keys.flag(f"{where}.truncate", True),
        mscale=keys.number_or_none(f"{where}.mscale"),
        mscale_all_dim=keys.number_or_none(f"{where}.mscale_all_dim"),
        attention_factor=keys.number_or_none(f"{where}.attention_factor"),
    )


def _expected(keys: ArchitectureKeys) -> dict[str, bool]:
    """Which of the tensors that some models lack this one has, in every layer."""
    qwen2, qwen3 = keys.arch == "qwen2", keys.arch == "qwen3"
    bias = not qwen2 and keys.flag("attention_bias", False)
    wide = keys.arch == "llama" and keys.flag("mlp_bias", False)
    return {
        **{f"attn_{n}.bias": qwen2 or bias for n in "qkv"},
        "attn_output.bias": bias,
        **{f"ffn_{n}.bias": wide for n in ("gate", "up", "down")},
        **{f"attn_{n}_norm.weight": qwen3 for n in "qk"},
    }


def _check_expected(
    folder: SafetensorsFolder,
    names: Mapping[str, str],
    layers: int,
    expected: Mapping[str, bool],
) -> None:
    parts = {new: old for old, new in LAYER_NAMES.items()}
    for i in range(layers):
        for name, wanted in expected.items():
            if (f"blk.{i}.{name}" in names) != wanted:
                part, _, end = name.rpartition(".")
                raise folder.error(
                    f"tensor model.layers.{i}.{parts[part]}.{end} is "
                    f"{'missing' if wanted else 'there'}, other than config.json says"
                )
