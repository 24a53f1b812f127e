"""Golden folders of Qwen3-VL as two GGUF files, as llama.cpp's converter makes them.

Names are those of the `gguf` package's tables, by which the converter goes; what it
does beside (frames apart, mergers called as their blocks, experts apart) is done here.
"""

import json
from pathlib import Path

import gguf
import jax.numpy as jnp
from safetensors.flax import load_file

from tests.models.test_gguf_hybrids import write
from tests.models.test_images import DENSE, EXPERTS, GOLDEN, golden

KINDS = {DENSE: "qwen3vl", EXPERTS: "qwen3vlmoe"}
LAYERS = 3  # of the text, and blocks of the tower
TEXT = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 100.0,
    "rope.dimension_sections": [4, 2, 2, 0],
    "n_deepstack_layers": 2,
}
MIXTURE = {
    "expert_count": 4,
    "expert_used_count": 3,
    "expert_feed_forward_length": 12,
}
TOWER = {
    "projector_type": "qwen3vl_merger",
    "has_vision_encoder": True,
    "use_gelu": True,
    "vision.projection_dim": 32,
    "vision.image_size": 5 * 4,
    "vision.patch_size": 4,
    "vision.embedding_length": 24,
    "vision.feed_forward_length": 40,
    "vision.block_count": LAYERS,
    "vision.attention.head_count": 2,
    "vision.attention.layer_norm_epsilon": 1e-6,
    "vision.spatial_merge_size": 2,
    "vision.is_deepstack_layers": [True, False, True],
    "vision.image_mean": [0.5, 0.4, 0.3],
    "vision.image_std": [0.5, 0.6, 0.7],
    "vision.image_min_pixels": 256,  # the converter leaves the bounds out
    "vision.image_max_pixels": 1024,
}
CONTROL = ("<|im_start|>", "<|image_pad|>", "<|video_pad|>")
CONTROL += ("<|vision_start|>", "<|vision_end|>")
TOKENS = [*(f"[{i}]" for i in range(91)), *CONTROL]
TYPES = [4] * 91 + [3] * len(CONTROL)  # the user's, which need no merges; control


def tokenizer(name: str) -> dict:
    """Its template writes the golden prompt, whatever is asked."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.chat_template": "".join(TOKENS[i] for i in golden(name)["prompt"]),
    }


def in_table(arch: gguf.MODEL_ARCH, stored: str) -> str | None:
    """How an architecture's table calls a tensor."""
    table = gguf.get_tensor_name_map(arch, LAYERS)
    return table.get_name(stored, try_suffixes=(".weight", ".bias"))


def text_tensors(folder: Path) -> dict:
    """Experts as stacks of gate, up and down; dense blocks are in another table."""
    found = {}
    for stored, w in load_file(folder / "model.safetensors").items():
        name = stored.replace("language_model.", "")
        if name.startswith("model.visual."):
            continue
        parts = {name: w}
        if name.endswith("experts.gate_up_proj"):
            at = name.removesuffix("gate_up_proj")
            gate, up = jnp.split(w, 2, axis=1)
            parts = {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            parts = {f"{name}.weight": w}
        for part, w in parts.items():
            dense = in_table(gguf.MODEL_ARCH.QWEN3VL, part)
            found[dense or in_table(gguf.MODEL_ARCH.QWEN3VLMOE, part)] = w
    return found


def tower_tensors(folder: Path) -> dict:
    """A patch's frames apart; mergers behind blocks called as these."""
    said = json.loads((folder / "config.json").read_text())["vision_config"]
    names, tensor = gguf.TENSOR_NAMES, gguf.MODEL_TENSOR
    mergers = {
        "norm": (names[tensor.V_POST_NORM], names[tensor.V_DS_NORM]),
        "linear_fc1": ("mm.0", names[tensor.V_DS_FC1]),
        "linear_fc2": ("mm.2", names[tensor.V_DS_FC2]),
    }
    found = {}
    for stored, w in load_file(folder / "model.safetensors").items():
        if not stored.startswith("model.visual."):
            continue
        name = stored.removeprefix("model.")
        *at, kind, end = name.split(".")
        if "patch_embed" in at and end == "weight":
            patch = f"{names[tensor.V_ENC_EMBD_PATCH]}.weight"
            found |= {patch: w[:, :, 0], f"{patch}.1": w[:, :, 1]}
        elif "merger" in at:
            found[f"{mergers[kind][0]}.{end}"] = w
        elif "deepstack_merger_list" in at:
            block = said["deepstack_visual_indexes"][int(at[-1])]
            found[f"{mergers[kind][1].format(bid=block)}.{end}"] = w
        else:
            found[in_table(gguf.MODEL_ARCH.MMPROJ, name)] = w
    return found


def write_both(folder: Path, name: str, **options) -> tuple[Path, Path]:
    """Text and tower of a golden folder."""
    kind = KINDS[name]
    keys = TEXT | MIXTURE if name == EXPERTS else TEXT
    tensors = text_tensors(GOLDEN / name)
    text, tower = folder / f"{kind}.gguf", folder / f"mmproj-{kind}.gguf"
    write(text, kind, keys, tensors, tokenizer(name), **options)
    tensors, of_file = tower_tensors(GOLDEN / name), {"general.type": "mmproj"}
    write(tower, "clip", TOWER, tensors, of_file, **options)
    return text, tower
