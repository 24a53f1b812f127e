"""Blocks of queries and of keys of the kernels of flash attention, warps and stages."""

from typing import Any

import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.precision import one_product
from jaxkern.gpu.triton_call import max_shared_bytes
from jaxkern.triton.attention.attention.problem import Constants

FORWARD = "flash_attention"
KEYS = "flash_attention_bwd_keys"
VALUES = "flash_attention_bwd_values"  # dv alone
QUERIES = "flash_attention_bwd_queries"

# BLOCK_Q, BLOCK_K, warps and stages of float32, up to a head dim: multiplied as TF32 on
# a Hopper GPU, and everywhere else
Table = dict[str, dict[int, tuple[int, int, int, int]]]
TF32: Table = {
    FORWARD: {
        64: (128, 64, 4, 2),
        128: (128, 32, 8, 3),
        256: (128, 64, 8, 1),
        512: (64, 32, 8, 1),
    },
    KEYS: {64: (64, 128, 8, 1), 128: (32, 128, 8, 1), 256: (16, 64, 4, 2)},
    VALUES: {64: (64, 128, 8, 1), 128: (32, 64, 4, 2), 256: (32, 64, 4, 2)},
    QUERIES: {64: (128, 32, 8, 2), 128: (128, 64, 8, 1), 256: (64, 16, 4, 2)},
}
FLOAT32: Table = {
    FORWARD: {
        64: (64, 32, 4, 1),
        128: (64, 32, 4, 1),
        256: (32, 32, 4, 1),
        512: (16, 16, 4, 1),
    },
    KEYS: {64: (32, 64, 4, 1), 128: (32, 32, 4, 1), 256: (16, 16, 4, 1)},
    VALUES: {64: (32, 64, 4, 1), 128: (32, 64, 4, 1), 256: (16, 16, 4, 1)},
    QUERIES: {64: (64, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1)},
}


def roomy() -> bool:
    """Whether a program has the shared memory of a Hopper GPU."""
    return max_shared_bytes() >= 200 * 1024


def forward_sizes(width: int) -> dict[str, int]:
    """Sizes by the wider head dim, as a power of 2."""
    large = roomy()
    if width > 256:
        return dict(BLOCK_Q=64, BLOCK_K=32, warps=8, stages=2)
    if width <= 64:
        return dict(BLOCK_Q=128, BLOCK_K=128 if large else 64, warps=4, stages=3)
    if width == 128:
        return dict(BLOCK_Q=128, BLOCK_K=128 if large else 64, warps=8, stages=2)
    return dict(BLOCK_Q=128, BLOCK_K=64 if large else 32, warps=8, stages=2)


def piece(constants: Constants, dtype: Any) -> int:
    """Dims of the head in one product of scores; more float32 than this would spill."""
    least = 512 if one_product(dtype) else 256
    wide = max(constants.PADDED_H, constants.PADDED_HV) >= least
    return min(constants.PADDED_H, 64 if wide and dtype == jnp.float32 else 512)


def separate(constants: Constants, dtype: Any) -> bool:
    """Whether dk and dv have a launch each: registers do not hold both."""
    wide = max(constants.PADDED_H, constants.PADDED_HV) >= 256
    return wide and dtype == jnp.float32


def key_sizes(width: int) -> dict[str, int]:
    large = roomy()
    if width <= 64:
        return dict(BLOCK_Q=64, BLOCK_K=128, warps=8 if large else 4, stages=2)
    if width == 128:
        return dict(BLOCK_Q=64 if large else 32, BLOCK_K=128, warps=8, stages=2)
    return dict(BLOCK_Q=64 if large else 32, BLOCK_K=64, warps=8, stages=1)


def query_sizes(width: int) -> dict[str, int]:
    large = roomy()
    if width <= 64:
        return dict(BLOCK_Q=128, BLOCK_K=64, warps=8 if large else 4, stages=2)
    if width == 128:
        return dict(BLOCK_Q=128, BLOCK_K=64 if large else 32, warps=8, stages=2)
    return dict(BLOCK_Q=128 if large else 64, BLOCK_K=32, warps=8, stages=2)


RULES = {
    FORWARD: forward_sizes,
    KEYS: key_sizes,
    VALUES: key_sizes,
    QUERIES: query_sizes,
}


def float32_sizes(kernel: str, width: int) -> dict[str, int]:
    table = TF32 if roomy() and one_product(jnp.float32) else FLOAT32
    sizes = next(x for up_to, x in table[kernel].items() if width <= up_to)
    names = "BLOCK_Q", "BLOCK_K", "warps", "stages"
    return dict(zip(names, sizes, strict=True))


def sizes_of(kernel: str, given: dict[str, Any]) -> dict[str, int]:
    query, value = given["q_ptr"], given["v_ptr"]
    width = next_power_of_2(max(query.shape[3], value.shape[3]))
    if query.dtype == jnp.float32:
        found = float32_sizes(kernel, width)
    else:
        found = RULES[kernel](width)
    found["num_warps"], found["num_stages"] = found.pop("warps"), found.pop("stages")
    found = found
    if given["mask_ptr"] is not None or given["bias_ptr"] is not None:
        # a value for each pair takes registers and shared memory beside k and v
        found["num_stages"] = min(found["num_stages"], 2 if width <= 128 else 1)
        if kernel == FORWARD and query.dtype != jnp.float32:
            wide = width <= 128 and roomy()
            found["BLOCK_K"] = min(found["BLOCK_K"], 64 if wide else 32)
            found["num_warps"] = 8
    return found
