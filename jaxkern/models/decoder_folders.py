"""Folders of Hugging Face whose models are `decoder.py` with other layers."""

from dataclasses import replace
from types import ModuleType

import jax

from jaxkern.formats.architecture_keys import architecture_keys
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.models import (
    deepseek,
    gpt_oss,
    granite_hybrid,
    lfm2,
    qwen3_moe,
    qwen3_next,
)
from jaxkern.models.decoder import DecoderConfig, DecoderWeights
from jaxkern.models.folder_keys import HARMLESS, WITHOUT
from jaxkern.models.folder_tensors import FolderTensors
from jaxkern.models.llama_gguf import Policy, choose_policy

# The page of each model_type: what its config.json and its tensors mean.
PAGES: dict[str, ModuleType] = {
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "lfm2": lfm2,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "granitemoehybrid": granite_hybrid,
}


def load_decoder(
    folder: SafetensorsFolder, policy: Policy = "auto"
) -> tuple[DecoderConfig, DecoderWeights]:
    """Loads a model, one tensor after the other.

    Raises:
      SafetensorsError: a key of config.json or a tensor is not known, is missing, or
        contradicts the others.
    """
    page = PAGES[folder.architecture]
    policy, _ = choose_policy(folder, policy)
    harmless = {**HARMLESS, **page.HARMLESS}
    for read in getattr(page, "READ", ()):  # which the page reads after all
        del harmless[read]
    without = {**WITHOUT, **getattr(page, "WITHOUT", {})}
    with architecture_keys(folder, harmless, without) as keys:
        config, widths = page.read(keys, len(folder.tensors))
    narrow = policy == "bf16" or (
        policy != "f32" and jax.default_backend() == "gpu"
    )
    config = replace(config, dtype="bfloat16" if narrow else "float32")
    take = FolderTensors(folder, policy)
    weights = page.weights(take, config, widths)
    take.refuse_rest(page.IGNORED)
    return config, jax.block_until_ready(weights)
