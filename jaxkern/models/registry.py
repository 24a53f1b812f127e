"""Which architectures there are; a file comes to a page through the list here.

A new one is a page, an `Architecture` in a file of its own, and a name in this list.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxkern.formats.architecture_keys import architecture_keys
from jaxkern.formats.gguf import GGUFFile
from jaxkern.formats.safetensors import CODES, SafetensorsFolder
from jaxkern.models import (
    deepseek_files,
    ernie4_5_files,
    falcon_h1_files,
    gemma4_files,
    glm4_moe_files,
    gpt_oss_files,
    granite_files,
    granite_hybrid_files,
    hugging_face,
    kimi_linear_files,
    lfm2_files,
    llama_files,
    minimax_m2_files,
    mistral_files,
    nemotron_h_files,
    olmoe_files,
    qwen3_moe_files,
    qwen3_next_files,
    qwen3_vl_files,
    seed_oss_files,
)
from jaxkern.models.architecture import Architecture, ModelFile, Tensor

ARCHITECTURES: tuple[Architecture, ...] = (
    *llama_files.ARCHITECTURES,
    *gemma4_files.ARCHITECTURES,
    *qwen3_moe_files.ARCHITECTURES,
    *gpt_oss_files.ARCHITECTURES,
    *qwen3_next_files.ARCHITECTURES,
    *qwen3_vl_files.ARCHITECTURES,
    *lfm2_files.ARCHITECTURES,
    *deepseek_files.ARCHITECTURES,
    *glm4_moe_files.ARCHITECTURES,
    *granite_files.ARCHITECTURES,
    *granite_hybrid_files.ARCHITECTURES,
    *kimi_linear_files.ARCHITECTURES,
    *mistral_files.ARCHITECTURES,
    *minimax_m2_files.ARCHITECTURES,
    *olmoe_files.ARCHITECTURES,
    *nemotron_h_files.ARCHITECTURES,
    *falcon_h1_files.ARCHITECTURES,
    *seed_oss_files.ARCHITECTURES,
    *ernie4_5_files.ARCHITECTURES,
)
BY_GGUF = {name: a for a in ARCHITECTURES if a.gguf for name in (a.gguf, *a.gguf_also)}
BY_MODEL_TYPE = {a.model_type: a for a in ARCHITECTURES if a.model_type}


@dataclass(frozen=True)
class Described:
    """A file that is understood.

    Attributes:
      architecture: what it is.
      config: what the page computes with.
      file: with the names of a GGUF file, and only tensors that are used.
      tensors: every tensor that it may have: its shape.
    """

    architecture: Architecture
    config: Any
    file: ModelFile
    tensors: Mapping[str, tuple[int, ...]]


def described(file: ModelFile) -> Described:
    """What a file says of its model, every key and tensor of it understood.

    Raises:
      ValueError: of the file's kind (`GGUFError`, `SafetensorsError`): another
        architecture, a feature that is not built here, a key or tensor that is not
        known, one that is missing, or some that contradict each other.
    """
    return of_gguf(file) if isinstance(file, GGUFFile) else of_folder(file)


def of_gguf(file: GGUFFile) -> Described:
    """`described` of a GGUF file, with its tower if it has one."""
    found = BY_GGUF.get(file.architecture)
    if found is None or found.from_gguf is None:
        raise file.error(
            f"general.architecture is {file.architecture!r}, known are "
            f"{', '.join(BY_GGUF)}"
        )
    with architecture_keys(file) as keys:
        config, tensors = found.from_gguf(keys)
    whole = checked(file, tensors, found.names)
    if file.tower is not None:
        if found.with_tower is None:
            raise file.error(
                f"general.architecture is {file.architecture!r}, which reads no "
                f"images: load it without the tower {file.tower.path}"
            )
        config, seen = found.with_tower(config, keys)
        whole = whole.joined(checked(file.tower, seen, found.names))
        tensors = {**tensors, **seen}
    return Described(found, config, whole, shapes_of(tensors))


def of_folder(folder: SafetensorsFolder) -> Described:
    """`described` of a folder of Hugging Face."""
    found = BY_MODEL_TYPE.get(folder.architecture)
    if found is None or found.from_folder is None:
        raise folder.error(
            f"model_type is {folder.architecture!r}, known are "
            f"{', '.join(BY_MODEL_TYPE)}"
        )
    folder = renamed(folder, found.names)
    harmless = {**hugging_face.HARMLESS, **found.harmless}
    without = {**hugging_face.WITHOUT, **found.without}
    with architecture_keys(folder, harmless, without) as keys:
        config, tensors = found.from_folder(keys)
    whole = checked(folder, tensors, found.names)
    return Described(found, config, whole, shapes_of(tensors))


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def config_of(file: ModelFile) -> Any:
    """The config of the page that computes the file; see `described`."""
    return described(file).config


def renamed(folder: SafetensorsFolder, names: Mapping[str, str]) -> SafetensorsFolder:
    """The folder with the names of a GGUF file, of templates as in `Architecture`."""
    patterns = [(as_pattern(stored), name) for stored, name in names.items()]
    found: dict[str, str] = {}
    for stored in folder.tensors:
        for pattern, name in patterns:
            if match := pattern.fullmatch(stored):
                new = name.format(**match.groupdict())
                break
        else:
            raise folder.error(
                f"tensor {stored!r} has no place in a model of type "
                f"{folder.architecture}"
            )
        if new in found:
            raise folder.error(f"tensors {found[new]!r} and {stored!r} are the same")
        found[new] = stored
    return folder.renamed(found)


def as_pattern(template: str) -> re.Pattern[str]:
    """ "x.{i}.y" matches x.0.y and x.10.y, not x.01.y; "x.{rest}" all under x."""
    escaped = re.escape(template)
    for letter in "ij":
        number = rf"(?P<{letter}>0|[1-9]\d{{0,5}})"
        escaped = escaped.replace(re.escape(f"{{{letter}}}"), number)
    return re.compile(escaped.replace(re.escape("{rest}"), r"(?P<rest>.+)"))


def stored_name(names: Mapping[str, str], name: str) -> str:
    """How a folder would call a tensor that it has not."""
    for stored, new in names.items():
        if match := as_pattern(new).fullmatch(name):
            return stored.format(**match.groupdict())
    return name


def checked[File: (GGUFFile, SafetensorsFolder)](
    file: File, tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> File:
    """The file without what is not used; what it has is what `tensors` says."""
    for name, tensor in tensors.items():
        info = file.tensors.get(name)
        if info is None:
            if tensor.needed and tensor.used:
                if isinstance(file, SafetensorsFolder):
                    name = stored_name(names, name)
                raise file.error(f"has no tensor {name}")
        elif tensor.used and info.shape != tensor.shape:
            raise file.error(
                f"tensor {file.called(name)} is {info.shape}, expected {tensor.shape} "
                "by the metadata and the tensors beside it"
            )
        elif tensor.used and (info.qtype in CODES) != tensor.codes:
            raise file.error(
                f"tensor {file.called(name)} is {info.qtype}, expected "
                f"{'codes of 8 bits' if tensor.codes else 'numbers'}"
            )
    if strangers := [name for name in file.tensors if name not in tensors]:
        raise file.error(
            f"tensor {file.called(strangers[0])} has no place in a model of "
            f"architecture {file.architecture} with these metadata"
        )
    used = {name: at for name, at in file.tensors.items() if tensors[name].used}
    return replace(file, tensors=used)
