"""What selection kernels share: floats ordered as integers, and a search for a cut.

A cut is found by counting, not by sorting: four pivots divide the integers that can be
it in five, one pass over the elements says in which fifth it lies, and 14 passes leave
a single one.
"""

from jaxkern.triton.triton_call import jit, tl


@jit
def ordered_bits(x):
    """float32 as int32 of the same order; -0.0 and 0.0 are equal, NaN is the largest.

    Of a negative number all bits but the sign are flipped.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, bits, 0x7FFFFFFF)


@jit
def add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@jit
def four_sums(x, weight, a, b, c, d):
    """The weights of the elements not below each of four pivots."""
    return tl.reduce(
        (
            tl.where(x >= a, weight, 0),
            tl.where(x >= b, weight, 0),
            tl.where(x >= c, weight, 0),
            tl.where(x >= d, weight, 0),
        ),
        None,
        add_four,
    )


@jit
def fifth(low, high):
    """Distance of the pivots between low and high, at least 1; in int64."""
    return (high - low + 4) // 5


@jit
def pivot(low, high, k, step):
    return tl.minimum(low + k * step, high).to(tl.int32)


@jit
def narrowed(low, high, step, target, at_low, s1, s2, s3, s4):
    """The bounds after a pass that found these sums at the pivots, and that at low."""
    reached = 0
    for k in tl.static_range(1, 5):
        s = s1 if k == 1 else s2 if k == 2 else s3 if k == 3 else s4
        enough = (s >= target) & (low + k * step < high)
        reached += enough.to(tl.int64)
        at_low = tl.where(enough, s, at_low)
    return low + reached * step, tl.minimum(high, low + (reached + 1) * step), at_low


@jit
def largest_threshold(keys, weight, target, most, low, high):
    """The largest t in [low, high) where the keys >= t weigh `target`; low if none.

    Any t where they weigh from `target` to `most` does as well.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    at_low = float("inf")
    while (high - low > 1) & (at_low > most):
        step = fifth(low, high)
        s1, s2, s3, s4 = four_sums(
            keys,
            weight,
            pivot(low, high, 1, step),
            pivot(low, high, 2, step),
            pivot(low, high, 3, step),
            pivot(low, high, 4, step),
        )
        low, high, at_low = narrowed(low, high, step, target, at_low, s1, s2, s3, s4)
    return low.to(tl.int32)
