"""`load`: a model from a GGUF file or a folder of Hugging Face."""

import os
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkern.models.architecture import ModelFile
    from jaxkern.models.weight_reader import Policy


def load(path: str | PathLike[str], policy: "Policy" = "auto") -> tuple[Any, Any]:
    """The configuration and weights of a model.

        config, weights = load("model.gguf")
        logits, cache = prefill(config, weights, tokens, lengths, cache)

    Args:
      path: a GGUF file, or a folder with `config.json` and `*.safetensors`.
      policy: how the weights are kept; see `weight_reader.choose_policy`.

    Returns:
      What `prefill` and `decode` of `jaxkern.models.cached_steps` take, and the
      functions of the page (`jaxkern.models.architecture.page_of`).

    Raises:
      ValueError: the file or folder is damaged, another model, or says something that
        is not understood (`GGUFError`, `SafetensorsError`).
      OSError: it cannot be opened.
    """
    return load_file(open_model(path), policy)


def open_model(path: str | PathLike[str]) -> "ModelFile":
    """The file or folder, opened: its headers are read."""
    if not os.path.isdir(path):
        from jaxkern.formats.gguf import read_gguf

        return read_gguf(path)
    from jaxkern.formats.safetensors import read_safetensors_folder

    return read_safetensors_folder(path)


def load_file(file: "ModelFile", policy: "Policy" = "auto") -> tuple[Any, Any]:
    """`load` of an open file; errors as of `jaxkern.models.registry.described`."""
    from dataclasses import replace

    import jax

    from jaxkern.models.registry import described
    from jaxkern.models.weight_reader import WeightReader

    model = described(file)
    reader = WeightReader(model.file, model.tensors, policy)
    config = replace(model.config, **reader.numerics)
    return config, jax.block_until_ready(model.architecture.weights(config, reader))
