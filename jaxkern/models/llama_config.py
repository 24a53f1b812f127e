"""The `LlamaConfig` of a GGUF file: its metadata, each with type and range checked."""

import math
from dataclasses import replace
from typing import Any

from jaxkern import LinearScaling, YarnScaling
from jaxkern.formats.gguf import GGUFError, GGUFFile
from jaxkern.models.llama import LlamaConfig
from jaxkern.primitives.rope.rope import Pairing
from jaxkern.primitives.rope.rope_frequencies import RopeScaling

# GGUF files of `llama` have the rows of q and k permuted for pairs of neighbours.
PAIRINGS: dict[str, Pairing] = {
    "llama": "interleaved",
    "qwen2": "neox",
    "qwen3": "neox",
}


def config_from_gguf(file: GGUFFile) -> LlamaConfig:
    """What the file's metadata say of the model.

    Raises:
      GGUFError: another architecture, a feature that is not built here, or metadata
        that are missing or contradict the weights.
    """
    arch = file.architecture
    if arch not in PAIRINGS:
        raise GGUFError(
            f"{file.path}: general.architecture is {arch!r}, known are "
            f"{', '.join(PAIRINGS)}."
        )
    read = _Metadata(file, arch)
    if read.integer("expert_count", 0):
        raise GGUFError(f"{file.path}: a mixture of experts, which is not built here.")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise GGUFError(f"{file.path}: has no tensor token_embd.weight of two dims.")
    heads, d_model = read.integer("attention.head_count"), table.shape[1]
    kv_heads = read.integer("attention.head_count_kv", heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise GGUFError(
            f"{file.path}: {heads} heads cannot share {kv_heads} key/value heads."
        )
    layers = read.integer("block_count")
    if not 1 <= layers <= len(file.tensors):
        raise GGUFError(
            f"{file.path}: key {arch}.block_count is {layers}, the file has "
            f"{len(file.tensors)} tensors."
        )
    head_dim = read.integer("attention.key_length", d_model // heads)
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise GGUFError(f"{file.path}: keys and values differ in length.")
    rotary_dim = read.integer("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise GGUFError(
            f"{file.path}: key {arch}.rope.dimension_count is {rotary_dim}, expected "
            f"an even number of the {head_dim} dims of a head."
        )
    return LlamaConfig(
        architecture=arch,
        context=read.integer("context_length"),
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=table.shape[0],
        eps=read.number("attention.layer_norm_rms_epsilon"),
        rotary_dim=rotary_dim,
        theta=read.number("rope.freq_base", 10000.0),
        pairing=PAIRINGS[arch],
        scaling=_rope_scaling(read),
        window=read.integer("attention.sliding_window", 0) or None,
    )


class _Metadata:
    """Keys of one architecture, with their types checked."""

    def __init__(self, file: GGUFFile, arch: str):
        self.file, self.arch = file, arch

    def get(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        name = f"{self.arch}.{key}"
        value = self.file.metadata.get(name, default)
        if value is None:
            raise GGUFError(f"{self.file.path}: has no key {name}.")
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise GGUFError(
                f"{self.file.path}: key {name} is {value!r}, expected {what}."
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, (int,), "an integer", default)
        if not 0 <= value < 2**31:
            raise GGUFError(
                f"{self.file.path}: key {self.arch}.{key} is {value}, expected 0 to "
                f"{2**31 - 1}."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self.get(key, (int, float), "a number", default))
        if not 0 < value < math.inf:
            raise GGUFError(
                f"{self.file.path}: key {self.arch}.{key} is {value}, expected a "
                "positive number."
            )
        return value

    def string(self, key: str, default: str) -> str:
        return self.get(key, (str,), "a string", default)


def _rope_scaling(read: _Metadata) -> RopeScaling | None:
    kind = read.string("rope.scaling.type", "none")
    factor = read.number("rope.scaling.factor", 1.0)
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "yarn":
        before = read.integer("rope.scaling.original_context_length")
        if before < 1:
            raise GGUFError(
                f"{read.file.path}: {read.arch}.rope.scaling.original_context_length "
                "is 0."
            )
        scaling = YarnScaling(factor, before)
        attention_factor = read.number("rope.scaling.attn_factor", 1.0)
        return replace(scaling, attention_factor=scaling.magnitude * attention_factor)
    raise GGUFError(
        f"{read.file.path}: {read.arch}.rope.scaling.type is {kind!r}, known are none, "
        "linear and yarn."
    )
