"""Where top_p cuts a row, guessed from the sums of its chunks, and sums around it.

The weight between two pivots of a chunk is taken to rise or fall evenly. In a row of
many logits the guess is wrong by 2 / 1000 of where the cut can be.
"""

from jaxkern.triton.index.threshold import sums_of_four
from jaxkern.triton.sampling.chunk_sums import bottom_of, four_sums_above, row_stats
from jaxkern.triton.sampling.weights import (
    load_logits,
    mass_of_top_p,
    slope_of,
    weight_of,
)
from jaxkern.triton.triton_call import jit, tl


@jit
def weight_at(pivots_ptr, j, total, present, PIVOTS: tl.constexpr):
    """The weight of a chunk above its largest logit, its pivots, its bottom."""
    pivot = present & (j > 0) & (j <= PIVOTS)
    return tl.where(j > PIVOTS, total, tl.load(pivots_ptr + j - 1, pivot, 0.0))


@jit
def weight_upto(place, fall, start, inside, rise):
    """The weight above a place, as if weights rose or fell evenly between pivots."""
    x = tl.minimum(tl.maximum(place * fall - start, 0.0), 1.0)
    return inside * (x + rise * (x * x - x))


@jit
def guess_of_cut(
    largest_ptr,
    total_ptr,
    bottom_ptr,
    pivots_ptr,
    row,
    best,
    height,
    slope,
    total,
    target,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
):
    """How far below the best logit the cut is, of height."""
    part = tl.arange(0, N)[:, None]
    present = part < PARTS
    at = row.to(tl.int64) * PARTS + part
    largest = tl.load(largest_ptr + at, present, -float("inf"))
    bottom = tl.load(bottom_ptr + at, present, -float("inf"))
    step = (largest - bottom) / (PIVOTS + 1)
    j = tl.arange(0, EDGES)[None, :]
    of_chunk = tl.load(total_ptr + at, present, 0.0)
    pivots_ptr += at * PIVOTS
    before = weight_at(pivots_ptr, j - 1, of_chunk, present, PIVOTS)
    upto = weight_at(pivots_ptr, j, of_chunk, present, PIVOTS)
    through = weight_at(pivots_ptr, j + 1, of_chunk, present, PIVOTS)
    after = weight_at(pivots_ptr, j + 2, of_chunk, present, PIVOTS)
    inside = tl.maximum(through - upto, 0.0)
    rise = ((after - through) - (upto - before)) / (4 * tl.maximum(inside, 1e-30))
    rise = tl.minimum(tl.maximum(rise, -0.95), 0.95)
    inside *= weight_of(largest, best, slope)
    fall = height / step
    start = (best - largest) / step + j
    place = 0.0
    width = 1.0
    low = 0.0
    high = total
    for _ in tl.static_range(2):
        width /= 5
        s1, s2, s3, s4 = sums_of_four(
            weight_upto(place + width, fall, start, inside, rise),
            weight_upto(place + 2 * width, fall, start, inside, rise),
            weight_upto(place + 3 * width, fall, start, inside, rise),
            weight_upto(place + 4 * width, fall, start, inside, rise),
        )
        for s in tl.static_range(1, 5):
            upto_s = s1 if s == 1 else s2 if s == 2 else s3 if s == 3 else s4
            light = upto_s < target
            place = tl.where(light, place + width, place)
            low = tl.where(light, upto_s, low)
            high = tl.where(light, high, tl.minimum(high, upto_s))
    rest = (target - low) / tl.maximum(high - low, 1e-30)
    return place + width * tl.minimum(tl.maximum(rest, 0.0), 1.0)


@jit
def place_of_pivot(k: tl.constexpr, guess):
    """Six around the guess, and two in case it is far off."""
    if k >= 6:
        return (k - 5) / 3
    else:
        away: tl.constexpr = 1 / 1024 if k < 2 else 1 / 300 if k < 4 else 1 / 85
        moved = guess + (away if k % 2 else -away)
        return tl.minimum(tl.maximum(moved, 0.0), 1.0)


@jit
def narrow_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    largest_ptr,
    total_ptr,
    bottom_ptr,
    pivots_ptr,
    edges_ptr,
    above_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weights above pivots around the cut of top_p."""
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    share = tl.load(top_p_ptr + row).to(tl.float32)
    if share < 1:
        slope = slope_of(tl.load(temperature_ptr + row))
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(logits_ptr + row.to(tl.int64) * V, at, at < V)
        best, totals = row_stats(largest_ptr, total_ptr, row, slope, PARTS, N)
        total = tl.sum(totals, 0)
        chunk = tl.arange(0, N)
        lowest = tl.load(
            bottom_ptr + row.to(tl.int64) * PARTS + chunk, chunk < PARTS, float("inf")
        )
        bottom = bottom_of(tl.min(lowest, 0), best, share, total, slope, V)
        height = best - bottom
        guess = guess_of_cut(
            largest_ptr,
            total_ptr,
            bottom_ptr,
            pivots_ptr,
            row,
            best,
            height,
            slope,
            total,
            mass_of_top_p(share, total),
            PARTS,
            N,
            PIVOTS,
            EDGES,
        )
        weight = weight_of(x, best, slope)
        above_ptr += (row.to(tl.int64) * PARTS + part) * PIVOTS
        edges_ptr += row * EDGES
        for k in tl.static_range(0, PIVOTS, 4):
            a = best - height * place_of_pivot(k, guess)
            b = best - height * place_of_pivot(k + 1, guess)
            c = best - height * place_of_pivot(k + 2, guess)
            d = best - height * place_of_pivot(k + 3, guess)
            s1, s2, s3, s4 = four_sums_above(x, weight, a, b, c, d)
            tl.store(above_ptr + k, s1)
            tl.store(above_ptr + k + 1, s2)
            tl.store(above_ptr + k + 2, s3)
            tl.store(above_ptr + k + 3, s4)
            if part == 0:
                tl.store(edges_ptr + k + 1, a)
                tl.store(edges_ptr + k + 2, b)
                tl.store(edges_ptr + k + 3, c)
                tl.store(edges_ptr + k + 4, d)
        if part == 0:
            tl.store(edges_ptr, best)
            last = PIVOTS + 1 + tl.arange(0, EDGES)
            tl.store(edges_ptr + last, bottom, last < EDGES)
