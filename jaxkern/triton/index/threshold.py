"""What selection kernels share: floats ordered as integers, and a search for a cut.

A cut is found by counting, not by sorting: four pivots divide the integers that can be
it in five, one pass over the elements says in which fifth it lies, and 14 passes leave
a single one.
"""

from jaxkern.gpu.triton_call import jit, tl


@jit
def ordered_bits(x):
    """float32 as int32 of the same order; -0.0 and 0.0 are equal, NaN is the largest.

    Of a negative number all bits but the sign are flipped.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, bits, 0x7FFFFFFF)


@jit
def from_ordered_bits(bits):
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@jit
def order_within(chosen):
    """How many are chosen before each element of a matrix, row after row."""
    one = chosen.to(tl.int32)
    rows = tl.sum(one, 1)
    return tl.cumsum(one, 1) - one + (tl.cumsum(rows, 0) - rows)[:, None]


@jit
def add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@jit
def sums_of_four(a, b, c, d):
    """In one reduction."""
    return tl.reduce((a, b, c, d), None, add_four)


@jit
def four_sums(x, weight, a, b, c, d):
    """The weights of the elements not below each of four pivots."""
    return sums_of_four(
        tl.where(x >= a, weight, 0),
        tl.where(x >= b, weight, 0),
        tl.where(x >= c, weight, 0),
        tl.where(x >= d, weight, 0),
    )


@jit
def pivot(low, k, step, reach):
    """The k-th pivot: k steps above low, at most low + reach."""
    return (low.to(tl.uint32) + tl.minimum(k * step, reach)).to(tl.int32)


@jit
def four_pivots(low, reach):
    """Their distance, and four pivots that divide [low, low + reach] evenly."""
    step = reach // 5 + 1
    return (
        step,
        pivot(low, 1, step, reach),
        pivot(low, 2, step, reach),
        pivot(low, 3, step, reach),
        pivot(low, 4, step, reach),
    )


@jit
def narrowed(low, reach, at_low, step, target, s1, s2, s3, s4):
    """The interval after a pass that found these sums at the pivots, at_low before."""
    steps = tl.zeros([], tl.uint32)
    for k in tl.static_range(1, 5):
        s = s1 if k == 1 else s2 if k == 2 else s3 if k == 3 else s4
        enough = (s >= target) & (k * step <= reach)
        steps += enough.to(tl.uint32)
        at_low = tl.where(enough, s, at_low)
    gone = steps * step
    low = (low.to(tl.uint32) + gone).to(tl.int32)
    return low, tl.minimum(step - 1, reach - gone), at_low


@jit
def distance(low, high):
    """high - low of two int32, as uint32."""
    return high.to(tl.uint32) - low.to(tl.uint32)


@jit
def largest_threshold(keys, weight, target, most, low, high, at_low):
    """The largest t in [low, high] where the keys >= t weigh `target`; low if none.

    Any t where they weigh from `target` to `most` does as well. They weigh `at_low` at
    low.
    """
    reach = distance(low, high)
    while (reach > 0) & (at_low > most):
        step, a, b, c, d = four_pivots(low, reach)
        s1, s2, s3, s4 = four_sums(keys, weight, a, b, c, d)
        low, reach, at_low = narrowed(low, reach, at_low, step, target, s1, s2, s3, s4)
    return low
