"""Routing of tokens in one launch: scores, bias, groups, choice and weights.

A program holds the logits of some tokens in registers. The experts are taken one by
one, as `top_k` takes them from short rows, and the logits of those that were chosen are
read again for their weights. Most choices by sigmoids: route_by_warps.py.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.index.threshold import ordered_bits
from jaxkern.triton.moe.choice import choice, weights_of
from jaxkern.triton.moe.route_by_warps import route_by_warps, warps_choose

MOST_EXPERTS = 2048
MOST_CHOSEN = 16


def unsupported(
    logits: Any, k: int, score: str, num_groups: int, top_groups: int, **named: Any
) -> str | None:
    """A reason in words, or None."""
    if score not in ("softmax", "sigmoid"):
        return f"scores that are {score} are not in the kernel"
    options = ("normalize", "scale_then_renorm", "group_score")
    named = {n: x for n, x in named.items() if n not in options}
    if reason := bridge.unsupported(logits=logits, **named):
        return reason
    e = logits.shape[-1]
    if not logits.size:
        return "`logits` is empty"
    if e > MOST_EXPERTS:
        return f"there are {e} experts, more than {MOST_EXPERTS}"
    if not 1 <= max(k, top_groups) <= MOST_CHOSEN or not k:
        return f"{k} of {top_groups} groups are chosen, not from 1 to {MOST_CHOSEN}"
    if num_groups > 1 and (e & (e - 1) or num_groups & (num_groups - 1)):
        return f"{e} experts in {num_groups} groups are no powers of 2"
    return None


@jit
def best_groups(
    rank,
    place,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """Which experts belong to the best groups."""
    SIZE: tl.constexpr = N // NUM_GROUPS
    grouped = tl.reshape(rank, (BLOCK, NUM_GROUPS, SIZE))
    key = ordered_bits(grouped)
    member = tl.arange(0, SIZE)[None, None, :]
    top = tl.max(key, 2, keep_dims=True)
    first = tl.min(tl.where(key == top, member, SIZE), 2, keep_dims=True)
    score = tl.sum(tl.where(member == first, grouped, 0.0), 2)
    if TOP2 and SIZE > 1:
        rest = tl.where(member == first, LOWEST, key)
        top = tl.max(rest, 2, keep_dims=True)
        second = tl.min(tl.where(rest == top, member, SIZE), 2, keep_dims=True)
        score += tl.sum(tl.where(member == second, grouped, 0.0), 2)
    key = ordered_bits(score)
    group = tl.arange(0, NUM_GROUPS)[None, :]
    kept = tl.zeros((BLOCK, N), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == top, group, NUM_GROUPS), 1)[:, None]
        kept += (place // SIZE == at).to(tl.int32)
        key = tl.where(group == at, LOWEST, key)
    return kept > 0


@jit
def choose_experts(
    row,
    logits_ptr,
    scale_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weights and ids of tokens `row`, BLOCK of them, in rows of WIDTH slots."""
    E: tl.constexpr = C.experts
    K: tl.constexpr = C.chosen
    N: tl.constexpr = C.places
    SLOTS: tl.constexpr = C.slots
    NUM_GROUPS: tl.constexpr = C.num_groups
    TOP_GROUPS: tl.constexpr = C.top_groups
    TOP2: tl.constexpr = C.top2
    LOWEST: tl.constexpr = C.lowest
    present = (row < ROWS)[:, None]
    logits_ptr += row.to(tl.int64)[:, None] * E
    place = tl.arange(0, N)[None, :]
    inside = present & (place < E)
    logits = tl.load(logits_ptr + place, inside, -float("inf")).to(tl.float32)
    top_logit = tl.max(logits, 1)[:, None]
    top_logit = tl.where(top_logit == -float("inf"), 0.0, top_logit)
    powers = tl.exp(logits - top_logit)
    total = tl.sum(powers, 1)[:, None]
    total = tl.where(total == 0.0, 1.0, total)
    rank = logits
    if bias_ptr is not None or TOP2:
        rank = tl.sigmoid(logits) if C.sigmoid else powers / total
    if bias_ptr is not None:
        rank += tl.load(bias_ptr + place, place < E, 0.0).to(tl.float32)
    if TOP_GROUPS < NUM_GROUPS:
        kept = best_groups(rank, place, BLOCK, N, NUM_GROUPS, TOP_GROUPS, TOP2, LOWEST)
        rank = tl.where(kept, rank, -float("inf"))
    key = tl.where(inside, ordered_bits(rank), LOWEST)
    slot = tl.arange(0, SLOTS)[None, :]
    ids = tl.zeros((BLOCK, SLOTS), tl.int32)
    dropped = ids > 0
    for i in tl.static_range(K):
        top = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == top, place, N), 1)[:, None]
        ids = tl.where(slot == i, at, ids)
        if TOP_GROUPS < NUM_GROUPS:
            dropped |= (slot == i) & (top == C.least)
        key = tl.where(place == at, LOWEST, key)

    wanted = present & (slot < K)
    chosen = tl.load(logits_ptr + ids, wanted, -float("inf")).to(tl.float32)
    weights = weights_of(chosen, ids, slot, dropped, top_logit, total, scale_ptr, C)
    out = row.to(tl.int64)[:, None] * WIDTH + slot
    tl.store(weights_ptr + out, weights.to(weights_ptr.dtype.element_ty), wanted)
    tl.store(ids_ptr + out, ids, wanted)


@jit
def route_kernel(
    logits_ptr,
    scale_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        begin_behind_those_ahead()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    choose_experts(
        row,
        logits_ptr,
        scale_ptr,
        bias_ptr,
        weights_ptr,
        ids_ptr,
        C,
        ROWS,
        C.chosen,
        BLOCK,
    )


def route(logits, per_expert_scale, correction_bias, *, k, **options):
    """(weights, ids), both `[..., k]`."""
    *lead, e = logits.shape
    rows, c = logits.size // e, choice(e, k=k, **options)
    if warps_choose(rows, c, logits.dtype.itemsize):
        return route_by_warps(logits, per_expert_scale, correction_bias, c)
    # one warp: what several share goes through shared memory
    found = {"BLOCK": 2 if c.places <= 256 else 1, "num_warps": 1}
    return bridge.sparse_call(
        route_kernel,
        (-(-rows // found["BLOCK"]),),
        {
            "logits_ptr": logits,
            "scale_ptr": per_expert_scale,
            "bias_ptr": correction_bias,
        },
        {
            "weights_ptr": jax.ShapeDtypeStruct((*lead, k), logits.dtype),
            "ids_ptr": jax.ShapeDtypeStruct((*lead, k), jnp.int32),
        },
        dict(C=c, ROWS=rows, **found),
    )
