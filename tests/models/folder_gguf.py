"""A folder of Hugging Face written as a GGUF file, as llama.cpp's converter does it."""

from pathlib import Path

import gguf
import numpy as np

from jaxkern import LinearScaling, LongRopeScaling, YarnScaling
from jaxkern.formats.safetensors import read_safetensors_folder
from jaxkern.models.llama_files import ARCHITECTURES
from jaxkern.models.registry import described
from tests.models.tiny_gguf import add_key

NAMES = {a.name: a.gguf for a in ARCHITECTURES if a.gguf}
NAMES |= {"mistral": "llama", "olmo3": "olmo2"}
PERMUTED = ("llama", "smollm3")  # rows of q and k: pairs of neighbours rotate
NORMS_PLUS_ONE = ("gemma2", "gemma3")


def write_gguf_of(folder: Path, path: Path, *, quantized: bool = False) -> Path:
    """Keys and tensors of the folder under the names of its GGUF architecture."""
    model = described(read_safetensors_folder(folder))
    kind = NAMES[model.architecture.name]
    writer = gguf.GGUFWriter(path, kind)
    keys = keys_of(model.config, kind)
    keys["feed_forward_length"] = model.file.tensors["blk.0.ffn_down.weight"].shape[1]
    for key, value in keys.items():
        add_key(writer, f"{kind}.{key}", value)
    for name in model.file.tensors:
        w: np.ndarray = model.file.view(name).astype(np.float32)
        part = name.split(".")[-2]
        if kind in PERMUTED and part in ("attn_q", "attn_k"):
            heads = w.reshape(-1, 2, model.config.head_dim // 2, *w.shape[1:])
            w = heads.swapaxes(1, 2).reshape(w.shape)
        if kind in NORMS_PLUS_ONE and part.endswith("norm"):
            w = w + 1
        if quantized and w.ndim == 2 and w.shape[-1] % 32 == 0:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(w, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, w)
    scaling = model.config.scaling
    if isinstance(scaling, LongRopeScaling):
        for name in ("long", "short"):
            factors = np.array(getattr(scaling, f"{name}_factor"), np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_of(config, kind: str) -> dict:
    keys = {
        "block_count": config.layers,
        "context_length": config.context,
        "embedding_length": config.d_model,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.eps,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": config.theta,
        "attention.sliding_window": config.window,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "attention.scale": config.attention_scale,
    }
    if config.windowed:
        keys["attention.sliding_window_pattern"] = list(config.windowed)
    if kind == "gemma3":
        keys["rope.freq_base_swa"] = config.local.theta
    scaling = config.scaling
    if isinstance(scaling, LinearScaling | YarnScaling):
        yarn = isinstance(scaling, YarnScaling)
        keys["rope.scaling.type"] = "yarn" if yarn else "linear"
        keys["rope.scaling.factor"] = scaling.factor
    if isinstance(scaling, YarnScaling):
        keys["rope.scaling.yarn_beta_fast"] = scaling.beta_fast
        keys["rope.scaling.yarn_beta_slow"] = scaling.beta_slow
    if isinstance(scaling, LongRopeScaling):
        keys["rope.scaling.attn_factor"] = scaling.magnitude
    if isinstance(scaling, YarnScaling | LongRopeScaling):
        keys["rope.scaling.original_context_length"] = scaling.original_length
    return {key: value for key, value in keys.items() if value is not None}
