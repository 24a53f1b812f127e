"""Adapters of products (LoRA): new ones, and folders of PEFT of Hugging Face.

    adapter_config.json           r, lora_alpha, target_modules, ...
    adapter_model.safetensors     base_model.model.<product>.lora_A.weight   [r, d]
                                  base_model.model.<product>.lora_B.weight   [f, r]

A product has the name that a folder of the model gives it, such as
"model.layers.0.self_attn.q_proj".
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkern.formats.finite_weights import NOT_FINITE
from jaxkern.formats.safetensors import LONGEST_JSON, SafetensorsFolder
from jaxkern.models.adapted import Adapted, LowRank, adapters_of, merged
from jaxkern.models.llama import LlamaConfig
from jaxkern.models.products import Matrices
from jaxkern.models.registry import Described, as_pattern
from jaxkern.models.weight_reader import WeightReader

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = {"lora_A.weight": "a", "lora_B.weight": "b"}
OUTSIDE = ("output.weight", "token_embd.weight")  # products that are no layer's
PERMUTED = ("attn_q", "attn_k")  # rows lie otherwise where pairs of neighbours rotate

MOST_ALPHA = float(np.finfo(np.float32).max)

# Keys of adapter_config.json that change nothing where an adapter is read, and values
# of others. A key of neither is refused unless it says "none" or "no".
HARMLESS = (
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version"),
    *("task_type", "inference_mode", "lora_dropout", "megatron_core"),
    *("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform"),
    "qalora_group_size",  # only read with use_qalora
)
READ = ("peft_type", "r", "lora_alpha", "use_rslora")
KNOWN = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}


class AdapterError(ValueError):
    """An adapter that cannot be read, or that the model has no place for."""


class Source(Protocol):
    """Where the adapter of a product comes from."""

    def part(
        self, model: Described, name: str, shape: tuple[int, ...]
    ) -> tuple[LowRank, float] | None:
        """Of the tensor `name`, as `[f, d]`: its factors and scale, None for none."""
        ...

    def check(self, model: Described) -> None:
        """Raises AdapterError for what no product asked for."""
        ...


@dataclass
class NewAdapter:
    """Adapters that change nothing yet: A uniform within d**-0.5, B zero.

    Attributes:
      rank, alpha: s = alpha / rank.
      targets: last parts of the products' names, or "all".
      seed: of A.
    """

    rank: int
    alpha: float
    targets: Sequence[str]
    seed: int = 0
    there: dict[str, None] = field(default_factory=dict)  # last parts met

    def part(
        self, model: Described, name: str, shape: tuple[int, ...]
    ) -> tuple[LowRank, float] | None:
        own = product_name(model, name).rpartition(".")[2]
        self.there[own] = None
        if own not in self.targets and "all" not in self.targets:
            return None
        f, d = shape
        draws = np.random.default_rng([self.seed, *name.encode()])
        a = draws.uniform(-(d**-0.5), d**-0.5, (self.rank, d)).astype(np.float32)
        return LowRank(jnp.asarray(a), jnp.zeros((f, self.rank))), (
            self.alpha / self.rank
        )

    def check(self, model: Described) -> None:
        for target in self.targets:
            if target not in self.there and target != "all":
                raise AdapterError(
                    f"lora.targets: {model.architecture.name} has no product "
                    f"{target!r}, but {', '.join(self.there)}."
                )


@dataclass
class SavedAdapter:
    """An adapter of a folder; see `read_adapter`.

    Attributes:
      path: as given.
      factors: by the product's name.
      scale: s of all.
      met: products that the model has.
    """

    path: str
    factors: Mapping[str, LowRank]
    scale: float
    met: set[str] = field(default_factory=set)

    def part(
        self, model: Described, name: str, shape: tuple[int, ...]
    ) -> tuple[LowRank, float] | None:
        product = product_name(model, name)
        found = self.factors.get(product)
        if found is None:
            return None
        self.met.add(product)
        if (found.b.shape[0], found.a.shape[1]) != shape:
            raise AdapterError(
                f"{self.path}: {product} is of a matrix {found.b.shape[0]} x "
                f"{found.a.shape[1]}, the model's is {shape[0]} x {shape[1]}."
            )
        return LowRank(found.a, rows_for(model, name, found.b)), self.scale

    def check(self, model: Described) -> None:
        if lost := sorted(self.factors.keys() - self.met):
            raise AdapterError(
                f"{self.path}: {lost[0]} is no product that can have an adapter in a "
                f"model of {model.architecture.name}."
            )


class AdaptingReader(WeightReader):
    """Reads the weights of a model with adapters at its products.

    Args:
      model: whose weights are read.
      policy: see `choose_policy`.
      source: of the adapters.
      merge: add them to the weights.
    """

    def __init__(self, model: Described, policy: Any, source: Source, *, merge: bool):
        super().__init__(model.file, model.tensors, policy)
        self.model, self.source, self.merge = model, source, merge
        if not isinstance(model.file, SafetensorsFolder) and not isinstance(
            model.config, LlamaConfig
        ):
            raise AdapterError(
                f"{model.file.path}: rows of a GGUF file of {model.file.architecture} "
                "may lie otherwise than in the folder that adapters are made for. Load "
                "the folder."
            )

    def matrices(self, *names: str) -> Matrices:
        """Those of the file, with their adapters."""
        base = super().matrices(*names)
        shapes = [self.file.tensors[name].shape for name in names]
        inside = not set(names) & set(OUTSIDE)
        found = [
            self.source.part(self.model, name, shape) if inside else None
            for name, shape in zip(names, shapes, strict=True)
        ]
        if not any(found):
            return base
        own = Adapted(
            base,
            parts=tuple(one and one[0] for one in found),
            names=names,
            widths=tuple(f for f, _ in shapes),
            scales=tuple(one[1] if one else 0.0 for one in found),
        )
        if self.merge:
            return merged(own, output_major=self.numerics["dtype"] == "train")
        return (own,)


def product_name(model: Described, name: str) -> str:
    """How a folder calls the product of a tensor, without ".weight"."""
    file = model.file
    if isinstance(file, SafetensorsFolder) and file.called(name) != name:
        return file.called(name).removesuffix(".weight")
    for stored, new in model.architecture.names.items():
        if match := as_pattern(new).fullmatch(name):
            return stored.format(**match.groupdict()).removesuffix(".weight")
    return name.removesuffix(".weight")


def rows_for(model: Described, name: str, b: jax.Array, *, back: bool = False):
    """B with its rows in the order of the file: GGUF puts pairs that rotate side by
    side where folders have halves; `back` is the other way."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    config = model.config
    if isinstance(model.file, SafetensorsFolder) or part not in PERMUTED:
        return b
    if not isinstance(config, LlamaConfig) or config.pairing != "interleaved":
        return b
    two = (config.head_dim // 2, 2) if back else (2, config.head_dim // 2)
    return b.reshape(-1, *two, b.shape[1]).swapaxes(1, 2).reshape(b.shape)


def read_adapter(path: str | PathLike[str]) -> SavedAdapter:
    """An adapter folder of PEFT.

    Raises:
      AdapterError: it is damaged, no LoRA, or says something that is not understood.
      OSError: it cannot be read.
    """
    path = fspath(path)
    said = _config(path)
    rank, alpha = said.get("r"), said.get("lora_alpha")
    fine = isinstance(alpha, int | float) and abs(alpha) <= MOST_ALPHA
    if type(rank) is not int or rank < 1 or alpha is None or not fine:
        raise AdapterError(
            f"{path}: r is {rank!r} and lora_alpha {alpha!r}, expected a rank and a "
            "finite number."
        )
    by_root = said.get("use_rslora")
    if by_root not in (True, False, None):
        raise AdapterError(
            f"{path}: key use_rslora of {CONFIG} is {by_root!r}, expected true or "
            "false."
        )
    scale = alpha / (rank**0.5 if by_root else rank)
    halves: dict[str, dict[str, jax.Array]] = {}
    try:
        with safe_open(os.path.join(path, WEIGHTS), framework="np") as file:
            for stored in file.keys():  # it is no mapping
                name, end = _parted(path, stored)
                w = np.asarray(file.get_tensor(stored), np.float32)
                if not np.isfinite(w).all():
                    raise AdapterError(f"{path}: tensor {stored} {NOT_FINITE}.")
                w = jnp.asarray(w)
                halves.setdefault(name, {})[end] = w
    except SafetensorError as error:
        raise AdapterError(f"{path}: {WEIGHTS}: {error}.") from None
    factors = {}
    for name, both in halves.items():
        a, b = both.get("a"), both.get("b")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2:
            raise AdapterError(f"{path}: {name} has not both matrices.")
        if (a.shape[0], b.shape[1]) != (rank, rank):
            raise AdapterError(
                f"{path}: {name} has ranks {a.shape[0]} and {b.shape[1]}, r is {rank}."
            )
        factors[name] = LowRank(a, b)
    if not factors:
        raise AdapterError(f"{path}: {WEIGHTS} has no adapter.")
    return SavedAdapter(path, factors, scale)


def _parted(path: str, stored: str) -> tuple[str, str]:
    """The product of a tensor, and which factor it is."""
    for end, factor in ENDS.items():
        if stored.startswith(PREFIX) and stored.endswith(f".{end}"):
            return stored.removeprefix(PREFIX).removesuffix(f".{end}"), factor
    raise AdapterError(
        f"{path}: tensor {stored!r} is neither lora_A nor lora_B of a product."
    )


def _config(path: str) -> dict[str, Any]:
    place = os.path.join(path, CONFIG)
    if not os.path.isfile(place):
        raise AdapterError(f"{path}: has no file {CONFIG}.")
    if os.path.getsize(place) > LONGEST_JSON:
        raise AdapterError(f"{path}: {CONFIG} has more than {LONGEST_JSON} bytes.")
    with open(place, "rb") as file:
        try:
            said = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{path}: {CONFIG} is not JSON: {error}.") from None
    if not isinstance(said, dict) or said.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: {CONFIG} is not that of a LoRA adapter.")
    for key, value in said.items():
        if key in HARMLESS or key in READ or value in KNOWN.get(key, ()):
            continue
        if value not in (None, False, [], {}, ""):
            raise AdapterError(
                f"{path}: key {key} of {CONFIG} is {value!r}, which is not understood."
            )
    return said


def write_adapter(
    path: str | PathLike[str],
    model: Described,
    weights: Any,
    *,
    rank: int,
    alpha: float,
    base: str = "",
) -> None:
    """Writes the adapters in a model's weights as PEFT reads them.

    Args:
      path: a folder; an adapter that is there is replaced.
      model: what the weights are of.
      weights: with `Adapted` products.
      rank, alpha: of all of them.
      base: the model's path.

    Raises:
      OSError: it cannot be written.
    """
    from safetensors.numpy import save_file

    tensors, products = {}, []
    for name, part in adapters_of(weights).items():
        product = product_name(model, name)
        products.append(product)
        b = rows_for(model, name, part.b, back=True)
        for end, w in zip(ENDS, (part.a, b), strict=True):
            w = np.ascontiguousarray(np.asarray(w, np.float32))
            tensors[f"{PREFIX}{product}.{end}"] = w
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": targets_of(model, products),
        "bias": "none",
        "inference_mode": True,
    }
    path = fspath(path)
    os.makedirs(path, exist_ok=True)
    part = os.path.join(path, f"{WEIGHTS}.part")
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, os.path.join(path, WEIGHTS))
    with open(os.path.join(path, CONFIG), "w") as file:
        json.dump(said, file, indent=1)
        file.write("\n")


def targets_of(model: Described, products: Sequence[str]) -> list[str]:
    """Last parts of the products' names; whole names of those that share theirs with a
    product without an adapter, such as the experts beside a shared one."""
    others = {
        product_name(model, name).rpartition(".")[2]
        for name in model.file.tensors
        if product_name(model, name) not in products
    }
    found = {}
    for product in products:
        own = product.rpartition(".")[2]
        found[product if own in others else own] = None
    return sorted(found)
