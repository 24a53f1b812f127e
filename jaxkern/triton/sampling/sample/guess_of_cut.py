"""Where top_p cuts a row, guessed from the sums of its chunks: a window of logits.

The weight between two pivots of a chunk is taken to rise or fall evenly. In a row of
many logits the guess is wrong by 4 / 1000 of where the cut can be; in one of few heavy
tokens by up to a tenth, and there a wide window holds few logits.
"""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.index.threshold import sums_of_four
from jaxkern.triton.sampling.sample.chunk_sums import bottom_of
from jaxkern.triton.sampling.sample.weights import mass_of_top_p, weight_of


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
def guess_of_cut(fall, start, inside, rise, total, target):
    """How far below the best logit the cut is, of the height."""
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
    return place + width * part_of(target - low, high - low)


@jit
def part_of(a, b):
    return tl.minimum(tl.maximum(a / tl.maximum(b, 1e-30), 0.0), 1.0)


@jit
def curve_of_row(
    largest_ptr,
    total_ptr,
    bottom_ptr,
    pivots_ptr,
    row,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Of each chunk the largest logit, the bottom, the weight above edges and next."""
    part = tl.arange(0, N)[:, None]
    present = part < PARTS
    at = row.to(tl.int64) * PARTS + part
    largest = tl.load(largest_ptr + at, present, -float("inf"))
    bottom = tl.load(bottom_ptr + at, present, float("inf"))
    total = tl.load(total_ptr + at, present, 0.0)
    j = tl.arange(0, EDGES)[None, :]
    pivots_ptr += at * PIVOTS
    return (
        largest,
        bottom,
        weight_at(pivots_ptr, j - 1, total, present, PIVOTS),
        weight_at(pivots_ptr, j, total, present, PIVOTS),
        weight_at(pivots_ptr, j + 1, total, present, PIVOTS),
        weight_at(pivots_ptr, j + 2, total, present, PIVOTS),
    )


@jit
def window_of_cut(
    curve,
    best,
    share,
    total,
    slope,
    PIVOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    V: tl.constexpr,
):
    """(low, high] around the cut: half of WINDOW logits in the fullest CHUNKS chunks.

    Narrower or wider only where that is beyond 1 / 1000 or 1 / 4 of the height.
    """
    largest, bottom, before, upto, through, after = curve
    N: tl.constexpr = upto.shape[0]
    j = tl.arange(0, upto.shape[1])[None, :]
    # at both ends as it rises or falls between the outer two
    inside = tl.maximum(through - upto, 0.0)
    above = tl.where(j > 0, upto - before, 2 * inside - (after - through))
    below = tl.where(j < PIVOTS, after - through, 2 * inside - above)
    rise = (below - above) / (4 * tl.maximum(inside, 1e-30))
    rise = tl.minimum(tl.maximum(rise, -0.95), 0.95)
    inside *= weight_of(largest, best, slope)

    lowest = tl.min(tl.min(bottom, 1), 0)
    height = best - bottom_of(lowest, best, share, total, slope, V)
    step = (largest - bottom) / (PIVOTS + 1)
    present = bottom < float("inf")
    fall = tl.where(present, height / step, 0.0)
    start = tl.where(present, (best - largest) / step + j, 0.0)
    target = mass_of_top_p(share, total)
    guess = guess_of_cut(fall, start, inside, rise, total, target)

    near: tl.constexpr = 1 / 250
    upto = tl.sum(weight_upto(guess - near, fall, start, inside, rise), 1)
    of_chunk = tl.sum(weight_upto(guess + near, fall, start, inside, rise), 1) - upto
    fullest = tl.max(tl.sum(tl.reshape(of_chunk, (N // CHUNKS, CHUNKS)), 1), 0)
    part_near = part_of(target - tl.sum(upto, 0), tl.sum(of_chunk, 0))
    guess += (2 * part_near - 1) * near
    # logits by their weight there
    dense = fullest / (2 * near) / weight_of(best - guess * height, best, slope)
    away = WINDOW / 4 / tl.maximum(dense, 1e-30)
    away = tl.minimum(tl.maximum(away, 1 / 1000), 1 / 4)
    away = tl.where(slope < float("inf"), away, 1.0)  # the best logit alone has weight
    return best - (guess + away) * height, best - (guess - away) * height
