"""`load`: a model from a GGUF file or a folder of Hugging Face."""

import os
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkern.models.adapter import Source
    from jaxkern.models.architecture import ModelFile
    from jaxkern.models.registry import Described
    from jaxkern.models.weight_reader import Policy


def load(
    path: str | PathLike[str],
    policy: "Policy" = "auto",
    *,
    tower: str | PathLike[str] | None = None,
    adapter: str | PathLike[str] | None = None,
    merge: bool = False,
) -> tuple[Any, Any]:
    """The configuration and weights of a model.

        config, weights = load("model.gguf")
        logits, cache = prefill(config, weights, tokens, lengths, cache)

    Args:
      path: a GGUF file, or a folder with `config.json` and `*.safetensors`.
      policy: how the weights are kept; see `weight_reader.choose_policy`.
      tower: of a GGUF file that reads images, the file with the rest of its model, as
        llama.cpp calls it `mmproj-*.gguf`; without it the model reads text alone.
      adapter: a folder of PEFT with LoRA of products; see `jaxkern.models.adapter`.
      merge: add it to the weights, which must not be quantised then.

    Returns:
      What `prefill` and `decode` of `jaxkern.models.cached_steps` take, and the
      functions of the page (`jaxkern.models.architecture.page_of`).

    Raises:
      ValueError: the file or folder is damaged, another model, or says something that
        is not understood, or a weight is NaN or infinite (`GGUFError`,
        `SafetensorsError`, `AdapterError`).
      OSError: it cannot be opened.
    """
    return load_file(open_model(path, tower), policy, adapter=adapter, merge=merge)


def open_model(
    path: str | PathLike[str], tower: str | PathLike[str] | None = None
) -> "ModelFile":
    """The file or folder, opened: its headers are read, and those of the tower."""
    if not os.path.isdir(path):
        from dataclasses import replace

        from jaxkern.formats.gguf import read_gguf

        file = read_gguf(path)
        return file if tower is None else replace(file, tower=read_gguf(tower))
    if tower is not None:
        raise ValueError(
            f"load: {os.fspath(path)} is a folder, which has the tower of its model: "
            f"load it without `tower`, got {os.fspath(tower)}."
        )
    from jaxkern.formats.safetensors import read_safetensors_folder

    return read_safetensors_folder(path)


def load_file(
    file: "ModelFile",
    policy: "Policy" = "auto",
    *,
    adapter: str | PathLike[str] | None = None,
    merge: bool = False,
) -> tuple[Any, Any]:
    """`load` of an open file; errors as of `jaxkern.models.registry.described`."""
    from jaxkern.models.registry import described

    model = described(file)
    if adapter is None:
        return load_described(model, policy)
    from jaxkern.models.adapter import read_adapter

    return load_described(model, policy, read_adapter(adapter), merge=merge)


def load_described(
    model: "Described",
    policy: "Policy",
    source: "Source | None" = None,
    *,
    merge: bool = False,
) -> tuple[Any, Any]:
    """`load` of a file that is understood, with the adapters of `source`."""
    from dataclasses import replace

    import jax

    from jaxkern.models.weight_reader import WeightReader

    if policy == "fp8_experts":
        check_experts(model)
    if source is None:
        reader = WeightReader(model.file, model.tensors, policy)
    else:
        from jaxkern.models.adapter import AdaptingReader

        reader = AdaptingReader(model, policy, source, merge=merge)
    config = replace(model.config, **reader.numerics)
    weights = model.architecture.weights(config, reader)
    reader.finish()
    if source is not None:
        source.check(model)
    return config, jax.block_until_ready(weights)


def check_experts(model: "Described") -> None:
    """ValueError unless the page of the model multiplies experts in 8 bits."""
    has_some = any("_exps." in name for name in model.file.tensors)
    if not has_some or not hasattr(model.config, "expert_dtype"):
        without = "has none" if not has_some else "has them on a page without it"
        raise ValueError(
            "load: weights='fp8_experts' is for experts of a mixture, and "
            f"{model.config.architecture} {without}. Take 'bf16'."
        )
