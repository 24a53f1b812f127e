"""The cut of top_p among the logits of a row that were collected around it."""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.index.threshold import (
    distance,
    four_sums,
    from_ordered_bits,
    ordered_bits,
)
from jaxkern.triton.sampling.sample.weights import kept_weight, weight_of


@jit
def cut_near_it(
    window_ptr,
    count,
    best,
    slope,
    least,
    above,
    total,
    target,
    WINDOW: tl.constexpr,
):
    """`cut_among` the collected logits, which mostly fill less than half their room."""
    if tl.max(count, 0) <= WINDOW // 2:
        found, cut, mass = cut_among(
            window_ptr, count, best, slope, least, above, total, target, WINDOW // 2
        )
    else:
        found, cut, mass = cut_among(
            window_ptr, count, best, slope, least, above, total, target, WINDOW
        )
    return found, cut, mass


@jit
def cut_of_share(keys, weight, target, most, low, high, at_low, best, slope):
    """`largest_threshold`, or another that keeps the same: a single key is between.

    Two pivots lie beside where the weight is the target if it rises evenly, and two
    divide what is left in three.
    """
    at_high = 0.0
    away = 1 / 32
    lightest = weight_of(from_ordered_bits(low), best, slope)
    while (low < high) & (at_low > most) & (at_low - at_high > 1.98 * lightest):
        bottom = from_ordered_bits(low)
        span = from_ordered_bits(high) - bottom
        place = bottom + span * (at_low - target) / (at_low - at_high)
        third = (distance(low, high) // 3).to(tl.int32)
        a = within(ordered_bits(place - away * span), low, high)
        b = within(ordered_bits(place + away * span), low, high)
        c = low + third + 1
        d = high - third
        s1, s2, s3, s4 = four_sums(keys, weight, a, b, c, d)
        for k in tl.static_range(4):
            pivot = a if k == 0 else b if k == 1 else c if k == 2 else d
            s = s1 if k == 0 else s2 if k == 1 else s3 if k == 2 else s4
            enough = s >= target
            low = tl.where(enough, tl.maximum(low, pivot), low)
            at_low = tl.where(enough, tl.minimum(at_low, s), at_low)
            high = tl.where(enough, high, tl.minimum(high, pivot - 1))
            at_high = tl.where(enough, at_high, tl.maximum(at_high, s))
        away = tl.minimum(2 * away, 1 / 8)
        lightest = weight_of(from_ordered_bits(low), best, slope)
    return low


@jit
def within(pivot, low, high):
    """Above low, or nothing is gained."""
    return tl.minimum(tl.maximum(pivot, low + 1), high)


@jit
def cut_among(
    window_ptr,
    count,
    best,
    slope,
    least,
    above,
    total,
    target,
    SLOTS: tl.constexpr,
):
    """Whether the cut is among these, the cut, and the weight of each part from it on.

    `above` is the weight above all of them.
    """
    slot = tl.arange(0, SLOTS)[None, :]
    near = slot < count[:, None]
    x = tl.load(window_ptr + slot, near, -float("inf"))
    weight = weight_of(x, best, slope)
    collected = tl.sum(tl.sum(weight, 1), 0)
    slack = 1e-6 * total  # sums in another order
    found = (above - slack < target) & (above + collected + slack >= target)
    longest = tl.max(count, 0)
    found = found & (longest > 0) & (longest <= SLOTS)
    keys = ordered_bits(x)
    cut = tl.max(tl.max(keys, 1), 0)
    mass = tl.zeros_like(above + count)
    if found:
        low = tl.min(tl.min(tl.where(near, keys, 0x7FFFFFFF), 1), 0)
        rest = target - above
        # another logit would weigh more than this
        lightest = 0.99 * weight_of(from_ordered_bits(low), best, slope)
        most = rest + lightest
        cut = cut_of_share(keys, weight, rest, most, low, cut, collected, best, slope)
        mass = tl.sum(kept_weight(x, best, slope, cut, least), 1)
    return found, cut, mass
