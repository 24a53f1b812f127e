"""Blocks of queries and of keys of the kernels of flash attention, warps and stages."""

from typing import Any

import jax.numpy as jnp

from jaxkern.triton.attention.problem import Constants, one_product
from jaxkern.triton.block_sizes import next_power_of_2, tuned
from jaxkern.triton.triton_call import max_shared_bytes


def roomy() -> bool:
    """Whether a program has the shared memory of a Hopper GPU."""
    return max_shared_bytes() >= 200 * 1024


def forward_sizes(width: int, dtype: Any) -> dict[str, int]:
    """Sizes by the wider head dim, as a power of 2."""
    large = roomy()
    if dtype == jnp.float32 and width > 256:
        return dict(BLOCK_Q=16, BLOCK_K=16, warps=4, stages=1)
    if dtype == jnp.float32:  # each product is three
        return dict(BLOCK_Q=64 if width < 256 else 32, BLOCK_K=32, warps=4, stages=1)
    if width > 256:
        return dict(BLOCK_Q=64, BLOCK_K=32, warps=8, stages=2)
    if width <= 64:
        return dict(BLOCK_Q=128, BLOCK_K=128 if large else 64, warps=4, stages=3)
    if width == 128:
        return dict(BLOCK_Q=128, BLOCK_K=128 if large else 64, warps=8, stages=2)
    return dict(BLOCK_Q=128, BLOCK_K=64 if large else 32, warps=8, stages=2)


def piece(constants: Constants, dtype: Any) -> int:
    """Dims of the head in one product of scores; more float32 than this would spill."""
    wide = max(constants.PADDED_H, constants.PADDED_HV) >= (512 if one_product(dtype) else 256)
    return min(constants.PADDED_H, 64 if wide and dtype == jnp.float32 else 512)


def key_sizes(width: int, dtype: Any) -> dict[str, int]:
    large = roomy()
    if dtype == jnp.float32:
        block_q = 32 if width < 256 or large else 16
        warps = 4 if width < 256 else 8
        return dict(BLOCK_Q=block_q, BLOCK_K=32, warps=warps, stages=1)
    if width <= 64:
        return dict(BLOCK_Q=64, BLOCK_K=128, warps=8 if large else 4, stages=2)
    if width == 128:
        return dict(BLOCK_Q=64 if large else 32, BLOCK_K=128, warps=8, stages=2)
    return dict(BLOCK_Q=64 if large else 32, BLOCK_K=64, warps=8, stages=1)


def query_sizes(width: int, dtype: Any) -> dict[str, int]:
    large = roomy()
    if dtype == jnp.float32:
        return dict(BLOCK_Q=32, BLOCK_K=32, warps=4 if width < 256 else 8, stages=1)
    if width <= 64:
        return dict(BLOCK_Q=128, BLOCK_K=64, warps=8 if large else 4, stages=2)
    if width == 128:
        return dict(BLOCK_Q=128, BLOCK_K=64 if large else 32, warps=8, stages=2)
    return dict(BLOCK_Q=128 if large else 64, BLOCK_K=32, warps=8, stages=2)


def sizes_of(kernel: str, rule: Any, given: dict[str, Any]) -> dict[str, int]:
    query, value = given["q_ptr"], given["v_ptr"]
    width = next_power_of_2(max(query.shape[3], value.shape[3]))
    found = rule(width, query.dtype)
    found["num_warps"], found["num_stages"] = found.pop("warps"), found.pop("stages")
    found = tuned(kernel, width, query.dtype, found)
    if given["mask_ptr"] is not None or given["bias_ptr"] is not None:
        # a value for each pair takes registers and shared memory beside k and v
        found["num_stages"] = min(found["num_stages"], 2 if width <= 128 else 1)
        if rule is forward_sizes and query.dtype != jnp.float32:
            wide = width <= 128 and roomy()
            found["BLOCK_K"] = min(found["BLOCK_K"], 64 if wide else 32)
            found["num_warps"] = 8
    return found
