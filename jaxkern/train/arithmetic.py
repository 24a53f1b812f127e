"""Arithmetic of a training step, and its share of the device's limit (MFU)."""

from math import prod
from typing import Any

import jax

from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.gemma4 import Gemma4Config
from jaxkern.models.mixers.delta_net import DeltaNet
from jaxkern.models.mixers.kimi_delta import KimiDelta
from jaxkern.models.mixers.latent import LatentAttention
from jaxkern.models.mixers.mamba2 import Mamba2
from jaxkern.models.mixers.parallel import Parallel
from jaxkern.models.mixers.short_conv import ShortConv
from jaxkern.models.registry import Described

TABLES = ("token_embd.weight", "per_layer_token_embd.weight")  # looked up

# dense products of bfloat16 per second, from NVIDIA's data sheets
LIMITS = {
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756.5e12,
    "H100": 989.4e12,
    "A100": 311.9e12,
    "L40S": 362.05e12,
    "L4": 121.0e12,
}


def device_limit(dtype: str) -> float | None:
    """Operations per second of one device, None where that is not known."""
    if dtype != "bfloat16":
        return None
    return limit_of(jax.devices()[0].device_kind)


def limit_of(kind: str) -> float | None:
    """By the name that JAX gives a kind of device."""
    words = set(kind.replace("-", " ").split())
    for name, limit in LIMITS.items():
        if words.issuperset(name.split()):
            return limit
    return None


def active_weights(model: Described) -> float:
    """Weights that one token is multiplied with: of experts the chosen ones.

    A table that is the output too counts once, one that is only looked up does not.
    """
    blocks = getattr(model.config, "feed_forwards", ())
    shares = {b.chosen / b.experts for b in blocks if hasattr(b, "chosen")}
    share = shares.pop() if shares else 1.0
    total = 0.0
    for name in model.file.tensors:
        shape = model.tensors[name]
        if len(shape) < 2 or (name in TABLES and "output.weight" in model.file.tensors):
            continue
        if name.endswith("_exps.scales"):
            continue
        size = prod(shape) * (2 if name.endswith("_exps.blocks") else 1)  # of 4 bits
        total += size * (share if "_exps." in name else 1.0)
    return total


def operations_per_token(
    model: Described, length: int, *, frozen: bool = False
) -> float:
    """6 for each active weight, 4 for frozen ones, and those of attention in a row.

    What is computed again for less memory does not count.
    """
    config = model.config
    forward = 2 * active_weights(model)
    attention = sum(mixed_channels(config, i) for i in range(config.layers)) * length
    # half of 4 operations for each pair: no token sees what is behind it
    return (2 if frozen else 3) * forward + 3 * attention


def mixed_channels(config: Any, i: int) -> int:
    """Channels of all queries and values of attention in layer i; 0 of another mixer,
    whose arithmetic beside its products is small."""
    if isinstance(config, Gemma4Config):
        return 2 * config.heads * config.heads_of(i).head_dim
    layer = config.mixers[i] if isinstance(config, DecoderConfig) else config
    if isinstance(layer, Parallel):
        layer = layer.attention
    if isinstance(layer, LatentAttention):
        both = layer.plain_dim + layer.rotary_dim + layer.value_dim
        return layer.heads * both
    recurrent = isinstance(layer, Mamba2 | DeltaNet | KimiDelta | ShortConv)
    return 0 if recurrent or layer is None else 2 * layer.heads * layer.head_dim


def utilisation(rate: float, operations: float, dtype: str) -> float | None:
    """The share of the limit of all devices at so many tokens per second."""
    limit = device_limit(dtype)
    if limit is None:
        return None
    return rate * operations / (limit * jax.device_count())
