"""`new_model`: a model of the registry with weights that are drawn."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxkern.formats.architecture_keys import architecture_keys
from jaxkern.formats.gguf import GGUFTensorInfo
from jaxkern.formats.safetensors import SafetensorsFolder, flat_keys
from jaxkern.models import hugging_face
from jaxkern.models.registry import BY_MODEL_TYPE, Described
from jaxkern.models.weight_reader import WeightReader

MOST_LAYERS = 2**12
STANDARD_DEVIATION = 0.02  # of matrices, where the keys have no initializer_range
BACK = ("attn_output", "ffn_down", "ssm_out", "out_proj")  # added to the residual
STEPS = (1e-3, 1e-1)  # of a recurrence in its time: softplus of their biases
DECAYS = (1.0, 16.0)  # of a recurrence: exp of their logarithms


@dataclass(frozen=True)
class NewModel(SafetensorsFolder):
    """A folder whose weights are drawn when they are read.

    Attributes:
      seed: with a tensor's name it says its weights, in any order of reading.
      deviation: of matrices; those that are added to the residual have
        `deviation / sqrt(2 layers)`.
    """

    seed: int = 0
    deviation: float = STANDARD_DEVIATION
    layers: int = 1

    def view(self, name: str) -> np.ndarray:
        """A tensor, the same at each call."""
        info = self.tensors[name]
        draws = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return first_weights(name, info.shape, draws, self.deviation, self.layers)


def first_weights(
    name: str,
    shape: tuple[int, ...],
    draws: np.random.Generator,
    deviation: float,
    layers: int,
) -> np.ndarray:
    """Before the first step: norms 1, biases 0, matrices normal, what a recurrence has
    as Mamba-2 and the delta nets begin.

    Raises:
      ValueError: a kind of tensor whose beginning is not known.
    """
    part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if name.endswith("ssm_dt.bias"):
        low, high = np.log(STEPS)
        steps = np.exp(draws.uniform(low, high, shape))
        return (steps + np.log(-np.expm1(-steps))).astype(np.float32)
    if "norm" in part or part in ("ssm_d", "layer_output_scale"):
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a_log"):
        return np.log(draws.uniform(*DECAYS, shape)).astype(np.float32)
    if name.endswith(".bias") or part == "attn_sinks":
        return np.zeros(shape, np.float32)
    if "conv1d" in part or part == "conv":
        bound = shape[-1] ** -0.5
        return draws.uniform(-bound, bound, shape).astype(np.float32)
    if len(shape) < 2:
        raise ValueError(f"model: how {name} {shape} begins is not known.")
    if part.startswith(BACK):
        deviation = deviation / (2 * layers) ** 0.5
    w = draws.standard_normal(shape, np.float32)
    w *= np.float32(deviation)
    return w


class NewWeights(WeightReader):
    """Norms are 1 as the page reads them, also where they are stored less 1."""

    def vector(self, name: str, *, plus: float = 0.0) -> jax.Array:
        del plus
        return super().vector(name)


def new_model(keys: Mapping[str, Any], seed: int) -> Described:
    """What the keys of a config.json describe, with weights that are drawn.

    Args:
      keys: `model_type` and its own, such as `hidden_size`.
      seed: of the weights.

    Returns:
      As `jaxkern.models.registry.described` of a folder with this config.json.

    Raises:
      ValueError: another model type, a key that is missing, not known or wrong.
    """
    metadata = flat_keys("model", keys)
    kind = metadata["general.architecture"]
    found = BY_MODEL_TYPE.get(kind)
    if found is None or found.from_folder is None:
        known = ", ".join(BY_MODEL_TYPE)
        raise ValueError(f"model: model_type is {kind!r}, known are {known}.")
    # readers compare the number of layers with that of the tensors
    some = GGUFTensorInfo((), "F32", 0, 0)
    folder = NewModel(
        "model", metadata, dict.fromkeys(map(str, range(MOST_LAYERS)), some), {}
    )
    harmless = {**hugging_face.HARMLESS, **found.harmless}
    without = {**hugging_face.WITHOUT, **found.without}
    with architecture_keys(folder, harmless, without) as read:
        config, tensors = found.from_folder(read)
    shapes = {n: t.shape for n, t in tensors.items() if t.needed and t.used}
    shapes = {n: s for n, s in shapes.items() if s}
    said = keys.get("initializer_range", STANDARD_DEVIATION)
    if not isinstance(said, int | float) or not 0 < said < 10:
        raise ValueError(f"model: initializer_range must be positive, got {said!r}.")
    folder = replace(
        folder,
        tensors={
            n: GGUFTensorInfo(s, "F32", 0, 4 * int(np.prod(s)))
            for n, s in shapes.items()
        },
        seed=seed,
        deviation=float(said),
        layers=config.layers,
    )
    return Described(found, config, folder, shapes)
