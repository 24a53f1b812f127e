"""The slots of each expert together, by one launch: `expert_order` without a sort.

The program of an expert reads all ids. Those of experts before it say where its slots
begin; its own follow each other in their order.
"""

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, tl

MOST = 2048  # slots that a program reads at once


@jit
def slot_order_kernel(
    ids_ptr,
    order_ptr,
    sizes_ptr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program EXPERTS has the slots of no expert, which come last."""
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, SLOTS, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        there = slot < SLOTS
        named = tl.load(ids_ptr + slot, there, EXPERTS)
        named = tl.where((named >= 0) & (named < EXPERTS), named, EXPERTS)
        before += (there & (named < expert)).to(tl.int32)
    start = tl.sum(before, 0)
    size = 0
    for first in range(0, SLOTS, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        there = slot < SLOTS
        named = tl.load(ids_ptr + slot, there, EXPERTS)
        named = tl.where((named >= 0) & (named < EXPERTS), named, EXPERTS)
        own = there & (named == expert)
        place = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order_ptr + start + size + place - 1, slot, own)
        size += tl.sum(own.to(tl.int32), 0)
    tl.store(sizes_ptr + expert, size, expert < EXPERTS)


def slot_order(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """(order `[slots]`, sizes `[experts]`) of `expert_order`, for ids `[..., k]`."""
    block = min(MOST, next_power_of_2(ids.size))
    order, sizes = bridge.triton_call(
        slot_order_kernel,
        ids.reshape(-1).astype(jnp.int32),
        out=[
            jax.ShapeDtypeStruct((ids.size,), jnp.int32),
            jax.ShapeDtypeStruct((experts,), jnp.int32),
        ],
        grid=(experts + 1,),
        num_warps=max(1, block // 512),
        SLOTS=ids.size,
        EXPERTS=experts,
        BLOCK=block,
    )
    return order, sizes
