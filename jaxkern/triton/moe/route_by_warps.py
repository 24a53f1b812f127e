"""Routing by sigmoids: each warp has a token's experts in its lanes.

The experts of a lane are one of the groups of few_largest.py, and part of one of the
groups that experts are chosen from. So what these count by is two numbers of a lane; in
a group that is not chosen the lanes count as -inf, and so does what is read again.
"""

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.device import WARP
from jaxkern.gpu.triton_call import gl, gluon_jit, jit, tl
from jaxkern.triton.index.few_largest import (
    STEP,
    WARPS,
    Levels,
    few_of_lanes,
    group_keys,
    group_maxima,
    group_sizes,
    groups_pay,
    larger,
    member_layout,
    pairs_layout,
    parts_of_largest,
    ranked,
    rows_and_lanes,
)
from jaxkern.triton.index.threshold import ordered_bits
from jaxkern.triton.moe.choice import Choice, weights_of


def warps_choose(rows: int, c: Choice, itemsize: int) -> bool:
    """Whether a token has a warp: where that pays, and no score is a sum over all."""
    if not c.sigmoid or c.num_groups > WARP:
        return False
    pays = c.top_groups < c.num_groups or groups_pay(rows, c.experts)
    return pays and few_of_lanes(c.experts, c.chosen, itemsize)


@jit
def two_larger(a, second_a, b, second_b):
    """The two largest of two pairs, each the larger one first."""
    return larger(a, b), larger(tl.minimum(a, b), larger(second_a, second_b))


@jit
def two_largest(x_ptr, bias_ptr, lane, member, C: tl.constexpr):
    """The two largest of the elements of each lane."""
    SIZE: tl.constexpr = C.sizes[0]
    first = (lane * SIZE)[:, :, None] + member
    best = ranked(x_ptr[:, :, None], bias_ptr, first, C)
    second = tl.where(first < 0, best, -float("inf"))  # -inf of its shape
    for i in tl.static_range(member.shape[2], SIZE, member.shape[2]):
        rank = ranked(x_ptr[:, :, None], bias_ptr, first + i, C)
        second = larger(second, tl.minimum(best, rank))
        best = larger(best, rank)
    return tl.reduce((best, second), 2, two_larger)


@jit
def in_best_groups(score, group, C: tl.constexpr):
    """Which lanes belong to the groups of the largest scores, the first of equals."""
    TOP_GROUPS: tl.constexpr = C.top_groups
    key = ordered_bits(score)
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == top, group, 0x7FFFFFFF), 1)[:, None]
        key = tl.where(group == at, C.lowest, key)
    return key == C.lowest


@gluon_jit
def lanes_in_best_groups(
    best, second, lane, C: gl.constexpr, LANES: gl.constexpr, LAYOUT: gl.constexpr
):
    """Likewise by the two largest of each lane, or the largest."""
    GROUPS: gl.constexpr = C.num_groups
    EACH: gl.constexpr = LANES // GROUPS
    ROWS: gl.constexpr = best.shape[0]
    best = best.reshape([ROWS, GROUPS, EACH])
    if C.top2:
        second = second.reshape([ROWS, GROUPS, EACH])
        a, b = gl.reduce((best, second), 2, two_larger)
        score = a + b
    else:
        score = gl.reduce(best, 2, larger)
    score = score[:, :, None].broadcast_to([ROWS, GROUPS, EACH])
    score = gl.convert_layout(score.reshape([ROWS, LANES]), LAYOUT)
    return in_best_groups(score, lane // EACH, C)


@gluon_jit
def lane_keys(
    logits_ptr,
    bias_ptr,
    lane,
    member,
    C: gl.constexpr,
    L: gl.constexpr,
    LANES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """What the experts of a lane count as; those of groups not chosen as -inf."""
    if C.top2:
        best, second = two_largest(logits_ptr, bias_ptr, lane, member, L)
    else:
        best = group_maxima(logits_ptr, bias_ptr, lane, member, L, L.sizes[0])
        second = best
    kept = lanes_in_best_groups(best, second, lane, C, LANES, LAYOUT)
    return gl.where(kept, ordered_bits(best), C.least)


@gluon_jit
def route_by_warps_kernel(
    logits_ptr,
    scale_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    C: gl.constexpr,
    L: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    LANES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    if AHEAD:
        begin_behind_those_ahead()
    LAYOUT: gl.constexpr = pairs_layout(L.step, gl.num_warps())
    MEMBERS: gl.constexpr = member_layout(L.step, gl.num_warps())
    row, lane = rows_and_lanes(ROWS, BLOCK, LANES, LAYOUT)
    logits_ptr += row * C.experts
    keys, ids = lane, lane
    for i in gl.static_range(len(L.sizes) - 1):
        member = gl.arange(0, min(L.sizes[i], L.step), MEMBERS)[None, None, :]
        if C.top_groups == C.num_groups:
            key = group_keys(logits_ptr, bias_ptr, ids, member, L, L.sizes[i])
        elif i == 0:
            key = lane_keys(logits_ptr, bias_ptr, lane, member, C, L, LANES, LAYOUT)
        else:
            key = group_keys(logits_ptr, bias_ptr, ids, member, L, L.sizes[i])
            key = gl.minimum(key, keys)
        keys, ids = parts_of_largest(key, ids, lane, L, L.sizes[i], L.sizes[i + 1])
    wanted = lane < C.chosen
    chosen = gl.load(logits_ptr + ids, wanted, -float("inf")).to(gl.float32)
    dropped = (keys == C.least) & (C.top_groups < C.num_groups)
    weights = weights_of(chosen, ids, lane, dropped, None, None, scale_ptr, C)
    out = row * C.chosen + lane
    gl.store(weights_ptr + out, weights.to(weights_ptr.dtype.element_ty), wanted)
    gl.store(ids_ptr + out, ids, wanted)


def route_by_warps(logits, scale, bias, c: Choice):
    """(weights, ids), both `[..., k]`."""
    *lead, e = logits.shape
    rows = logits.size // e
    sigmoid = bias is not None or c.top2  # else the order of logits is theirs
    levels = Levels(e, c.chosen, group_sizes(e, c.chosen), STEP, sigmoid)
    return bridge.sparse_call(
        route_by_warps_kernel,
        (-(-rows // WARPS),),
        {"logits_ptr": logits, "scale_ptr": scale, "bias_ptr": bias},
        {
            "weights_ptr": jax.ShapeDtypeStruct((*lead, c.chosen), logits.dtype),
            "ids_ptr": jax.ShapeDtypeStruct((*lead, c.chosen), jnp.int32),
        },
        dict(C=c, L=levels, ROWS=rows, BLOCK=WARPS, LANES=WARP, num_warps=WARPS),
    )
