"""The threshold of top_p in a row that a cluster holds, by the weights of bins.

Bins first divide the logits below the best evenly, then the floats in the bin of the
cut, in their order, until that holds a single logit or equal ones. A bin sums integers,
so that neither the order nor the place of logits counts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.sampling.sample.bins import (
    ROUND,
    Even,
    Finer,
    InOrder,
    add_to_bins,
    bits_of,
    float_of,
    from_ordered,
    ordered,
    whole,
)
from jaxkern.pallas.sampling.sample.cluster_row import ClusterRow, running_sum
from jaxkern.pallas.sampling.sample.plan import BINS, in_each_warp

ALONE = 1.99  # units of the lightest: one logit has fewer, two have more


class Weights(NamedTuple):
    """exp2((x - base) slope) of logits: 1 of the best."""

    best: Any
    base: Any
    slope: Any

    def of(self, x):
        return jnp.exp2(jnp.minimum((x - self.base) * self.slope, 0.0))


class Crossing(NamedTuple):
    bin: Any
    before: Any  # weight of the bins before it
    units: Any  # that it has


class Search(NamedTuple):
    """The cut lies among the floats from low to high, as ordered integers."""

    turn: Any
    low: Any
    high: Any
    rest: Any  # weight that these are to reach
    alone: Any  # whether they hold one logit


def power_of_2_below(x):
    return float_of(bits_of(x) & 0x7F800000)


def width_of_bins(w: Weights):
    """A power of 2 that weighs 3/16 to 3/8 octaves, but not too small to count in."""
    width = power_of_2_below(0.375 / w.slope)
    least = power_of_2_below(jnp.abs(w.base) * 2.0**-20)
    return jnp.minimum(jnp.maximum(jnp.maximum(width, least), 2.0**-100), 2.0**121)


def number(size: int):
    """0, 1, ... size - 1 in each warp."""
    layout = in_each_warp(size)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def value_at(x, place):
    """Of numbers none of which is negative; 0 where there is none.

    The largest integer of a warp is one instruction, a sum over lanes is ten.
    """
    return float_of(jnp.max(jnp.where(number(x.size) == place, bits_of(x), 0), axis=0))


def crossing(sums, upto, rest) -> Crossing:
    """The bin where the cumulative weight reaches `rest`, else the last not empty."""
    bin_ = number(BINS)

    def last():
        return jnp.max(jnp.where(sums > 0.0, bin_, 0), axis=0)

    beyond = jnp.max(jnp.where(upto >= rest, BINS - bin_, 0), axis=0)
    at = lax.cond(beyond > 0, lambda: BINS - beyond, last)
    return Crossing(at, value_at(upto, at - 1), value_at(sums, at))


def cut_of_share(row: ClusterRow, w: Weights, share):
    """The largest t for which the logits >= t weigh `share` of all."""
    fixed, width = jnp.float32(row.c.fixed), width_of_bins(w)
    inverse = 1.0 / width
    nearest = w.best * inverse + ROUND
    octaves = width * w.slope
    even = Even(bits_of(nearest), inverse, octaves, fixed - 0.5 * octaves)
    row.over_lines(lambda x, _: add_to_bins(row, x, even))
    sums = row.bins_of_row(jnp.int32(0))

    # of a unit of the first bin; its upper end may be no float
    exponent = whole(nearest, row.interpret) + 0.5 - w.base * inverse
    exponent = exponent * octaves - fixed
    weight = sums * jnp.exp2(exponent - number(BINS).astype(jnp.float32) * octaves)
    upto = running_sum(weight, in_each_warp(BINS), row.interpret)
    target = jnp.maximum(share * float_of(jnp.max(bits_of(upto), axis=0)), 1e-30)
    found = crossing(sums, upto, target)
    top = whole(nearest, row.interpret) - found.bin.astype(jnp.float32) + 0.5
    top = top * width
    highest = jnp.minimum(top, w.base)
    one = jnp.exp2((highest - w.base) * w.slope - fixed)
    lightest = ALONE * jnp.exp2(fixed - octaves)

    def narrowed(s: Search, bins: Finer | InOrder, ends_of) -> Search:
        row.over_lines(lambda x, _: add_to_bins(row, x, bins))
        sums = row.bins_of_row(s.turn)
        upto = running_sum(sums * one, in_each_warp(BINS), row.interpret)
        found = crossing(sums, upto, s.rest)
        rest, alone = s.rest - found.before, found.units < lightest
        low, high = ends_of(found.bin)
        return Search(s.turn + 1, low, high, rest, alone)

    def ends_of(first, bin_, width):
        """Of a bin; where two meet, a logit is rounded to the even one."""
        middle = whole(float_of(first - bin_), row.interpret)
        odd = (first - bin_) & 1
        low, high = ordered((middle - 0.5) * width), ordered((middle + 0.5) * width)
        return low + odd, high - odd

    def finer(s: Search) -> Search:
        """As many bins as numbers beside ROUND have bits for, 256 or fewer."""
        parts = power_of_2_below(2.0**21 / jnp.maximum(jnp.abs(top * inverse), 1.0))
        parts = jnp.minimum(parts, BINS)
        first = bits_of(top * inverse * parts + ROUND)
        ends = from_ordered(s.low), from_ordered(s.high)
        bins = Finer(*ends, first, inverse * parts, highest, w.slope, fixed)

        def ends_inside(bin_):
            low, high = ends_of(first, bin_, width / parts)
            low = jnp.where(bin_ == BINS - 1, s.low, jnp.maximum(low, s.low))
            return low, jnp.minimum(high, s.high)

        return narrowed(s, bins, ends_inside)

    def in_order(s: Search) -> Search:
        shift = jnp.maximum(24 - lax.clz(s.high - s.low), 0)
        ends = from_ordered(s.low), from_ordered(s.high)
        bins = InOrder(*ends, s.high, shift, highest, w.slope, fixed)

        def ends_inside(bin_):
            high = s.high - lax.shift_left(bin_, shift)
            reach = lax.shift_left(jnp.int32(1), shift) - 1
            # high - low as an unsigned number
            near = (high - s.low >= 0) & (high - s.low <= reach)
            return jnp.where(near, s.low, high - reach), high

        return narrowed(s, bins, ends_inside)

    low, high = ends_of(even.first, found.bin, width)
    high = jnp.minimum(high, ordered(w.best))
    rest, alone = target - found.before, found.units < lightest

    def several(s: Search):
        span = s.high - s.low
        return ((span < 0) | (span >= row.c.spacing)) & jnp.logical_not(s.alone)

    second = finer(Search(jnp.int32(1), low, high, rest, alone))
    return from_ordered(lax.while_loop(several, in_order, second).low)
