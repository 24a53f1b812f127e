"""Sampling where few logits can be kept: only the groups that hold them are read.

The first launch writes the largest logit of every GROUP. At least k logits are not
below the k-th of these, so the k largest logits lie in groups that are not below it
either: the second launch, one program a row, reads those and lists their logits that
are not below it, which are few more than k. The list is sorted for the cuts; the draw
follows the order of the row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.triton.index.threshold import (
    from_ordered_bits,
    largest_threshold,
    order_within,
    ordered_bits,
)
from jaxkern.triton.sampling.sample.weights import (
    CHUNK,
    LOWEST,
    draw_from_memory,
    first_beyond,
    kept_weight,
    least_weight,
    load_logits,
    mass_of_top_p,
    slope_of,
    weight_of,
)

GROUP = 32  # logits of which the largest is written
SLOTS = 256  # groups that are read again, and logits of them that are listed


@jit
def maxima_kernel(
    logits_ptr,
    largest_ptr,
    V: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest logit of each group."""
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    first = tl.program_id(0) % PROGRAMS * (CHUNK // GROUP)
    part = first + tl.arange(0, CHUNK // GROUP)[:, None]
    at = part * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_logits(logits_ptr + row * V, at, at < V)
    out = largest_ptr + row * PARTS + part
    tl.store(out, tl.max(x, 1, keep_dims=True), part < PARTS)


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
    groups_ptr,
    logit_list_ptr,
    token_list_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Cuts and draws among the logits not below the k-th largest maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    groups_ptr += row * SLOTS
    logit_list_ptr += row * SLOTS
    token_list_ptr += row * SLOTS
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    slope = slope_of(temperature)
    # without a temperature the first of the best: all weight is theirs
    u = tl.where(temperature > 0, tl.load(uniform_ptr + row).to(tl.float32), 0.0)
    least = least_weight(min_p_ptr, row)
    share = 1.0
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + row).to(tl.float32)
    k = tl.load(top_k_ptr + row)
    k = tl.where(k > 0, k, V)
    slot = tl.arange(0, SLOTS)

    group = tl.arange(0, N)
    present = group < PARTS
    largest = tl.load(largest_ptr + row * PARTS + group, present, -float("inf"))
    best = tl.max(largest, 0)
    high = ordered_bits(best)
    best_of = tl.where(present, ordered_bits(largest), LOWEST - 1)
    # k groups are not below the least of them, unless k exceeds their number
    low = tl.min(tl.where(present, best_of, 0x7FFFFFFF), 0)
    low = tl.where(k <= PARTS, low, LOWEST)
    every = tl.full([], PARTS, tl.int32)
    cut = largest_threshold(best_of, 1, k, SLOTS, low, high, every)
    chosen = best_of >= cut
    count = tl.sum(chosen.to(tl.int32), 0)
    few = count <= SLOTS
    if few:
        tl.store(groups_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, chosen)
        tl.debug_barrier()
        groups = tl.load(groups_ptr + slot, slot < count, 0)
        at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (slot < count)[:, None] & (at < V)
        x = load_logits(logits_ptr, at, inside)
        keys = tl.where(inside, ordered_bits(x), LOWEST - 1)
        count = tl.sum((keys >= cut).to(tl.int32))
        cut = largest_threshold(keys, 1, k, SLOTS, cut, high, count)
        candidate = keys >= cut
        count = tl.sum(candidate.to(tl.int32))
        few = count <= SLOTS
        if few:
            place = order_within(candidate)
            tl.store(logit_list_ptr + place, x, candidate)
            tl.store(token_list_ptr + place, at, candidate)
    if few:
        tl.debug_barrier()
        listed = slot < count
        x = tl.load(logit_list_ptr + slot, listed, -float("inf"))
        token = tl.load(token_list_ptr + slot, listed, 0)
        keys = tl.where(listed, ordered_bits(x), LOWEST - 1)
        falling = tl.sort(keys, descending=True)
        cut = tl.min(tl.where(slot < tl.minimum(k, count), falling, 0x7FFFFFFF), 0)
        if top_p_ptr is not None:
            weight = weight_of(from_ordered_bits(falling), best, slope)
            mass = tl.cumsum(tl.where(falling >= cut, weight, 0.0), 0)
            target = mass_of_top_p(share, tl.max(mass, 0))
            within = tl.max(tl.where(mass >= target, falling, cut), 0)
            cut = tl.where(share < 1, within, cut)
        weight = tl.where(listed, kept_weight(x, best, slope, cut, least), 0.0)
        it = first_beyond(weight, u * tl.sum(weight, 0), SLOTS)
        token = tl.sum(tl.where(slot == it, token, 0), 0)
    else:
        token = draw_from_memory(
            logits_ptr,
            u,
            best,
            slope,
            k,
            share,
            least,
            True,
            top_p_ptr is not None,
            LOWEST,
            V,
            CHUNK,
        )
    tl.store(token_ptr + row, token)


def draw_by_groups(draw: dict, options: dict) -> Any:
    logits = draw["logits_ptr"]
    *_, v = logits.shape
    rows, groups, programs = logits.size // v, -(-v // GROUP), -(-v // CHUNK)
    n = {"V": v, "PARTS": groups, "GROUP": GROUP, "CHUNK": CHUNK}
    [largest] = sparse_call(
        maxima_kernel,
        (rows * programs,),
        {"logits_ptr": logits},
        {"largest_ptr": jax.ShapeDtypeStruct((rows, groups), jnp.float32)},
        n | {"PROGRAMS": programs, "num_warps": 8},
    )
    slots = jax.ShapeDtypeStruct((rows, SLOTS), jnp.int32)
    token, *_ = sparse_call(
        draw_by_groups_kernel,
        (rows,),
        draw | options | {"largest_ptr": largest},
        {
            "token_ptr": jax.ShapeDtypeStruct((rows,), jnp.int32),
            "groups_ptr": slots,
            "logit_list_ptr": jax.ShapeDtypeStruct((rows, SLOTS), jnp.float32),
            "token_list_ptr": slots,
        },
        n
        | {"N": next_power_of_2(groups), "SLOTS": SLOTS, "LOWEST": LOWEST}
        | {"num_warps": 8},
    )
    return token
