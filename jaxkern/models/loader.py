"""`load`: a model from a GGUF file or a folder of Hugging Face."""

import os
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkern.models.llama import LlamaConfig, LlamaWeights
    from jaxkern.models.llama_gguf import Policy


def load(
    path: str | PathLike[str], policy: "Policy" = "auto"
) -> "tuple[LlamaConfig, LlamaWeights]":
    """The configuration and weights of a model.

        config, weights = load("model.gguf")
        logits, cache = prefill(config, weights, tokens, lengths, cache)

    Args:
      path: a GGUF file, or a folder with `config.json` and `*.safetensors`.
      policy: how the weights are kept; see `jaxkern.models.llama_gguf.choose_policy`.

    Returns:
      What `prefill` and `decode` of `jaxkern.models.llama` take.

    Raises:
      ValueError: the file or folder is damaged, another model, or says something that
        is not understood (`GGUFError`, `SafetensorsError`).
      OSError: it cannot be opened.
    """
    from jaxkern.models.llama_gguf import load_llama

    if not os.path.isdir(path):
        from jaxkern.formats.gguf import read_gguf

        return load_llama(read_gguf(path), policy)
    from jaxkern.formats.safetensors import read_safetensors_folder
    from jaxkern.models.hugging_face import as_gguf

    config, folder = as_gguf(read_safetensors_folder(path))
    return load_llama(folder, policy, config=config)
