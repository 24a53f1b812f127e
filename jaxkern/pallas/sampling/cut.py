"""The threshold of top_p in a row that a cluster holds, by the weights of bins.

Bins first divide the logits below the best evenly, then the floats in the bin of the
cut, in their order, until that holds a single logit or equal ones. A bin sums integers,
so that neither the order nor the place of logits counts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.sampling.cluster_row import ClusterRow, running_sum
from jaxkern.pallas.sampling.plan import BINS, in_each_warp

ROUND = 1.5 * 2**23  # what is added to it is rounded to an integer
WHOLE = 2.0**23  # the last bits of the sum are the integer
ALONE = 1.99  # units of one logit are fewer than of two


class Weights(NamedTuple):
    """exp2((x - base) slope) of logits: 1 of the best."""

    best: Any
    base: Any
    slope: Any

    def of(self, x):
        return jnp.exp2(jnp.minimum((x - self.base) * self.slope, 0.0))


def bits_of(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def power_of_2_below(x):
    return float_of(bits_of(x) & 0x7F800000)


def flipped_if_negative(bits):
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.int32(31)) & 0x7FFFFFFF)


def ordered(x):
    """Integers of the same order; -0.0 and 0.0 are equal."""
    return flipped_if_negative(bits_of(x + 0.0))


def from_ordered(bits):
    return float_of(flipped_if_negative(bits))


def step_of_bins(w: Weights):
    """A power of 2 that weighs 3/16 to 3/8 octaves, but not too small to count in."""
    step = power_of_2_below(0.375 / w.slope)
    least = power_of_2_below(jnp.abs(w.base) * 2.0**-20)
    return jnp.minimum(jnp.maximum(jnp.maximum(step, least), 2.0**-100), 2.0**121)


def units(x, top, w: Weights, fixed: int):
    """The weight relative to that of `top`, as an integer."""
    y = jnp.exp2(jnp.minimum((x - top) * w.slope, 0.0) + fixed) + WHOLE
    return bits_of(y) - 0x4B000000


class Crossing(NamedTuple):
    bin: Any
    before: Any  # weight of the bins before it
    units: Any  # that it has


def crossing(sums, weight, rest, interpret: bool) -> Crossing:
    """The bin where the cumulative weight reaches `rest`, else the last not empty."""
    layout = in_each_warp(BINS)
    upto = running_sum(weight, layout, interpret)
    bin_ = plgpu.broadcasted_iota(jnp.int32, (BINS,), 0, layout=layout)
    first = jnp.min(jnp.where(upto >= rest, bin_, BINS), axis=0)
    last = jnp.max(jnp.where(sums > 0.0, bin_, 0), axis=0)
    at = jnp.minimum(first, last)
    before = jnp.sum(jnp.where(bin_ == at - 1, upto, 0.0), axis=0)
    return Crossing(at, before, jnp.sum(jnp.where(bin_ == at, sums, 0.0), axis=0))


class Search(NamedTuple):
    """The cut lies among the floats from low to high, as ordered integers."""

    turn: Any
    low: Any
    high: Any
    rest: Any  # weight that these are to reach
    alone: Any  # whether they hold one logit


def cut_of_share(row: ClusterRow, w: Weights, share):
    """The largest t for which the logits >= t weigh `share` of all."""
    fixed, interpret = row.c.fixed, row.interpret
    step = step_of_bins(w)
    inverse = 1.0 / step

    def rounded(x):
        return x * inverse + ROUND

    first = bits_of(rounded(w.best))

    def add(x, _):
        nearest = rounded(x)
        top = jnp.minimum((nearest - ROUND) * step + 0.5 * step, w.base)
        row.count(first - bits_of(nearest), units(x, top, w, fixed))

    row.over_lines(add)
    sums = row.bins_of_row(jnp.int32(0))
    bin_ = plgpu.broadcasted_iota(jnp.int32, (BINS,), 0, layout=in_each_warp(BINS))
    middle = (rounded(w.best) - ROUND) - bin_.astype(jnp.float32)
    tops = jnp.minimum((middle + 0.5) * step, w.base)
    one = jnp.exp2((tops - w.base) * w.slope - fixed)
    total = jnp.sum(sums * one, axis=0)
    target = jnp.maximum(share * total, 1e-30)
    found = crossing(sums, sums * one, target, interpret)

    middle = (rounded(w.best) - ROUND) - found.bin.astype(jnp.float32)
    top = jnp.minimum((middle + 0.5) * step, w.base)
    one = jnp.exp2((top - w.base) * w.slope - fixed)
    # a logit of the bin weighs so much at least
    lightest = jnp.exp2(fixed - step * w.slope)
    odd = (first - found.bin) & 1  # ties are rounded to even numbers
    low = ordered((middle - 0.5) * step) + odd
    high = jnp.minimum(ordered((middle + 0.5) * step) - odd, ordered(w.best))

    def narrow(s: Search) -> Search:
        span = s.high - s.low
        shift = jnp.maximum(24 - lax.clz(span), 0)
        lowest, highest = from_ordered(s.low), from_ordered(s.high)

        def add(x, _):
            inside = (x >= lowest) & (x <= highest)
            bin_ = lax.shift_right_logical(s.high - ordered(x), shift)
            row.count(jnp.where(inside, bin_, BINS), units(x, top, w, fixed))

        row.over_lines(add)
        sums = row.bins_of_row(lax.rem(s.turn, jnp.int32(2)))
        found = crossing(sums, sums * one, s.rest, interpret)
        high = s.high - lax.shift_left(found.bin, shift)
        reach = lax.shift_left(jnp.int32(1), shift) - 1
        distance = high - s.low
        # as unsigned numbers
        within = (distance >= 0) & (distance <= reach)
        return Search(
            s.turn + 1,
            jnp.where(within, s.low, high - reach),
            high,
            s.rest - found.before,
            found.units < ALONE * lightest,
        )

    searched = lax.while_loop(
        lambda s: (s.low != s.high) & jnp.logical_not(s.alone),
        narrow,
        Search(
            jnp.int32(1),
            low,
            high,
            target - found.before,
            found.units < ALONE * lightest,
        ),
    )
    return from_ordered(searched.low)
