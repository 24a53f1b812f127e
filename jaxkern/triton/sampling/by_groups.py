"""Sampling where few logits can be kept: only the groups that hold them are read.

The first launch writes the largest logit of every GROUP. At least k logits are not
below the k-th of these, so the k largest logits lie in groups that are not below it
either: the second launch, one program a row, reads those into registers, cuts and
draws.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.triton.block_sizes import next_power_of_2, tuned
from jaxkern.triton.index.threshold import largest_threshold, ordered_bits
from jaxkern.triton.sampling.weights import (
    CHUNK,
    LOWEST,
    draw_from_memory,
    first_beyond,
    kept_weight,
    least_weight,
    load_logits,
    mass_of_top_p,
    slope_of,
    stats,
    token_in,
    weight_of,
)
from jaxkern.triton.triton_call import jit, sparse_call, tl

GROUP = 32  # logits of which the largest is written
CANDIDATES = 256  # groups in registers


@jit
def draw_by_groups_kernel(
    logits_ptr,
    uniform_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    token_ptr,
    list_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Cuts and draws among the groups whose largest logits are the k largest."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    slope = slope_of(temperature)
    # without a temperature the first of the best: all weight is theirs
    u = tl.where(temperature > 0, tl.load(uniform_ptr + row).to(tl.float32), 0.0)
    least = least_weight(min_p_ptr, row)
    share = 1.0
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + row).to(tl.float32)
    group = tl.arange(0, N)
    largest = tl.load(largest_ptr + row * PARTS + group, group < PARTS, -float("inf"))
    best = tl.max(largest, 0)
    high = ordered_bits(best) + 1
    cut = tl.minimum(high, LOWEST)
    asked = 1.0 * V
    best_of = ordered_bits(largest)
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + row)
        asked = tl.where(k > 0, k.to(tl.float32), asked)
        present = group < PARTS
        # enough groups are not below the least of them, unless k exceeds their number
        least_of = tl.min(tl.where(present, best_of, 0x7FFFFFFF), 0)
        low = tl.where(asked <= PARTS, least_of, cut)
        one = present.to(tl.float32)
        cut = largest_threshold(best_of, one, asked, CANDIDATES, low, high)
    chosen = (best_of >= cut) & (group < PARTS)
    count = tl.sum(chosen.to(tl.int32), 0)
    if count <= CANDIDATES:
        list_ptr += row * CANDIDATES
        tl.store(list_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, chosen)
        tl.debug_barrier()
        slot = tl.arange(0, CANDIDATES)
        listed = tl.load(list_ptr + slot, slot < count, 0)
        at = listed[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (slot < count)[:, None] & (at < V)
        x = load_logits(row_ptr, at, inside)
        keys = ordered_bits(x)
        if top_k_ptr is not None:
            each = inside.to(tl.float32)
            cut = largest_threshold(keys, each, asked, asked, cut, high)
        if top_p_ptr is not None:
            if share < 1:
                weight = tl.where(keys >= cut, weight_of(x, best, slope), 0.0)
                target = mass_of_top_p(share, tl.sum(tl.sum(weight, 1), 0))
                cut = largest_threshold(keys, weight, target, target, cut, high)
        kept = tl.sum(kept_weight(x, best, slope, cut, least), 1)
        goal = u * tl.sum(kept, 0)
        it = first_beyond(kept, goal, CANDIDATES)
        goal -= tl.sum(tl.where(slot < it, kept, 0.0), 0)
        start = tl.sum(tl.where(slot == it, listed, 0), 0) * GROUP
        token = token_in(row_ptr, start, goal, best, slope, cut, least, GROUP, V)
    else:
        token = draw_from_memory(
            row_ptr,
            u,
            best,
            slope,
            asked,
            share,
            least,
            top_k_ptr is not None,
            top_p_ptr is not None,
            LOWEST,
            V,
            CHUNK,
        )
    tl.store(token_ptr + row, token)


def draw_by_groups(draw: dict, options: dict) -> Any:
    logits, temperature = draw["logits_ptr"], draw["temperature_ptr"]
    *_, v = logits.shape
    rows, groups = logits.size // v, -(-v // GROUP)
    sizes = {"GROUP": GROUP, "CANDIDATES": CANDIDATES, "CHUNK": CHUNK}
    token, _ = sparse_call(
        draw_by_groups_kernel,
        (rows,),
        draw | options | stats(logits, temperature, GROUP, "largest_ptr"),
        {
            "token_ptr": jax.ShapeDtypeStruct((rows,), jnp.int32),
            "list_ptr": jax.ShapeDtypeStruct((rows, CANDIDATES), jnp.int32),
        },
        {"V": v, "PARTS": groups, "N": next_power_of_2(groups), "LOWEST": LOWEST}
        | sizes
        | tuned("sample_draw_by_groups", v, logits.dtype, {"num_warps": 16}),
    )
    return token
