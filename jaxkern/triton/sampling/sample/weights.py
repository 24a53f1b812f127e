"""What every way of sampling shares: weights and the draw.

A weight is p / max(p). `draw_from_memory` is the way that always works: one program
passes over its row again and again.
"""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.index.threshold import (
    distance,
    four_pivots,
    four_sums,
    from_ordered_bits,
    narrowed,
    ordered_bits,
)

CHUNK = 4096  # logits of one program
LOWEST = -2139095041  # -inf as ordered bits


@jit
def load_logits(ptr, at, inside):
    """In float32; NaN counts as -inf: the larger of two is the one that is a number."""
    x = tl.load(ptr + at, inside, -float("inf")).to(tl.float32)
    return tl.maximum(x, -float("inf"))


@jit
def slope_of(temperature):
    """What a gap to the best logit is multiplied by in the exponent of 2.

    Above 0, so that a gap of inf weighs nothing at any temperature.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    least = tl.full([], 1, tl.int32).to(tl.float32, bitcast=True)
    t = temperature.to(tl.float32)
    return tl.where(t > 0, tl.maximum(log2_e / t, least), float("inf"))


@jit
def weight_of(x, best, slope):
    """p / max(p): 1 for the best logit, 0 for -inf, also if that is the best."""
    best = tl.where(best == -float("inf"), 0.0, best)
    # NaN is inf - inf or 0 * inf: of the best logit
    return power_of_2(tl.minimum((x - best) * slope, 0.0))


@jit
def power_of_2(x):
    """2**x, 0 instead of denormal numbers."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@jit
def mass_of_top_p(share, total):
    """The weight that top_p keeps: of one token at least."""
    return tl.maximum(share * total, 1e-30)


@jit
def least_weight(min_p_ptr, row):
    least = -1.0
    if min_p_ptr is not None:
        least = tl.load(min_p_ptr + row).to(tl.float32)
        least = tl.where(least > 1, 1.0, least)  # the best token stays
    return least


@jit
def kept_weight(x, best, slope, cut, least):
    """The weights that top_k and top_p keep, by their cut, and min_p."""
    weight = weight_of(x, best, slope)
    weight = tl.where(x >= from_ordered_bits(cut), weight, 0.0)
    return tl.where(weight < least, 0.0, weight)


@jit
def first_beyond(weight, goal, N: tl.constexpr):
    """The first entry above 0 whose cumulative sum exceeds goal, else the last."""
    i = tl.arange(0, N)
    passes = (tl.cumsum(weight, 0) > goal) & (weight > 0)
    first = tl.min(tl.where(passes, i, N), 0)
    return tl.minimum(first, tl.max(tl.where(weight > 0, i, 0), 0))


@jit
def token_in(
    row_ptr,
    start,
    goal,
    best,
    slope,
    cut,
    least,
    SIZE: tl.constexpr,
    V: tl.constexpr,
):
    """The token among SIZE at which the kept weight exceeds goal."""
    at = start + tl.arange(0, SIZE)
    x = load_logits(row_ptr, at, at < V)
    weight = kept_weight(x, best, slope, cut, least)
    return start + first_beyond(weight, goal, SIZE)


@jit
def row_sums(
    row_ptr,
    best,
    slope,
    a,
    b,
    c,
    d,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`four_sums` over a row in memory, of ones or of weights."""
    s1 = 0.0
    s2 = 0.0
    s3 = 0.0
    s4 = 0.0
    for first in range(0, V, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x = load_logits(row_ptr, at, at < V)
        weight = weight_of(x, best, slope)
        if COUNT:
            weight = (at < V).to(tl.float32)
        t1, t2, t3, t4 = four_sums(ordered_bits(x), weight, a, b, c, d)
        s1 += t1
        s2 += t2
        s3 += t3
        s4 += t4
    return s1, s2, s3, s4


@jit
def row_threshold(
    row_ptr,
    best,
    slope,
    target,
    low,
    high,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`largest_threshold` over a row in memory."""
    reach = distance(low, high)
    at_low = float("inf")
    while (reach > 0) & (at_low > target):
        step, a, b, c, d = four_pivots(low, reach)
        s1, s2, s3, s4 = row_sums(row_ptr, best, slope, a, b, c, d, COUNT, V, CHUNK)
        low, reach, at_low = narrowed(low, reach, at_low, step, target, s1, s2, s3, s4)
    return low


@jit
def draw_from_memory(
    row_ptr,
    u,
    best,
    slope,
    asked,
    share,
    least,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    LOWEST: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token of a row by passes over all of it, one after the other."""
    high = ordered_bits(best)
    cut = tl.minimum(high, LOWEST)
    if TOP_K:
        cut = row_threshold(row_ptr, best, slope, asked, cut, high, True, V, CHUNK)
    if TOP_P:
        if share < 1:
            total, _, _, _ = row_sums(
                row_ptr, best, slope, cut, cut, cut, cut, False, V, CHUNK
            )
            target = mass_of_top_p(share, total)
            cut = row_threshold(
                row_ptr, best, slope, target, cut, high, False, V, CHUNK
            )
    total = 0.0
    for first in range(0, V, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x = load_logits(row_ptr, at, at < V)
        total += tl.sum(kept_weight(x, best, slope, cut, least), 0)
    goal = u * total
    before = 0.0
    start = 0
    rest = 0.0
    for first in range(0, V, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x = load_logits(row_ptr, at, at < V)
        kept = tl.sum(kept_weight(x, best, slope, cut, least), 0)
        enters = (kept > 0) & (before <= goal)
        start = tl.where(enters, first, start)
        rest = tl.where(enters, goal - before, rest)
        before += kept
    return token_in(row_ptr, start, rest, best, slope, cut, least, CHUNK, V)
