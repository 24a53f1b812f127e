"""Arithmetic of a training step, and its share of the device's limit (MFU)."""

from typing import Any

import jax

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
    kind = jax.devices()[0].device_kind
    words = kind.split()
    for name, limit in LIMITS.items():
        if all(part in words or f"-{part}" in kind for part in name.split()):
            return limit
    return None


def active_weights(weights: Any, config: Any) -> float:
    """Weights that one token is multiplied with: of experts the chosen ones.

    A table that is the output too counts once, one that is only looked up does not.
    """
    shares = {}
    for block in getattr(config, "feed_forwards", ()):
        if hasattr(block, "chosen"):
            shares[block.experts] = block.chosen / block.experts
    total = 0.0
    for leaf in jax.tree.leaves(weights):
        if leaf.ndim == 2:
            total += leaf.size
        elif leaf.ndim == 3:
            total += leaf.size * shares.get(leaf.shape[0], 1.0)
    return total - (weights.embedding.size if weights.output else 0)


def operations_per_token(
    weights: Any, config: Any, length: int, *, frozen: bool = False
) -> float:
    """6 for each active weight, 4 for frozen ones, and those of attention in a row.

    What is computed again for less memory does not count.
    """
    forward = 2 * active_weights(weights, config)
    heads, head_dim = getattr(config, "heads", 0), getattr(config, "head_dim", 0)
    attention = 2 * config.layers * heads * head_dim * length  # causal: half of 4
    return (2 if frozen else 3) * forward + 3 * attention


def utilisation(rate: float, operations: float, dtype: str) -> float | None:
    """The share of the limit of all devices at so many tokens per second."""
    limit = device_limit(dtype)
    if limit is None:
        return None
    return rate * operations / (limit * jax.device_count())
