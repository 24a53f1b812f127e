"""Sums over the logits of a chunk and over the chunks of a row."""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.index.threshold import sums_of_four
from jaxkern.triton.sampling.sample.weights import weight_of

PIVOTS = 8
EDGES = 16  # the pivots with both ends, as a power of 2
CHUNKS = 4  # of one program that makes cuts


@jit
def four_sums_above(x, weight, a, b, c, d):
    """The weights of the elements above each of four numbers.

    What lies within 2**-64 of the number weighs a part of itself.
    """
    return sums_of_four(
        weight * is_above(x, a),
        weight * is_above(x, b),
        weight * is_above(x, c),
        weight * is_above(x, d),
    )


@jit
def is_above(x, a):
    """1 or 0, in the units that multiply and add: twice as fast as a comparison."""
    big: tl.constexpr = 2.0**64
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, 0f5F800000, $2;",
        "=f,f,f",
        [x, -a * big],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def slightly_below(x):
    return x - tl.maximum(tl.abs(x) * 1e-6, 1e-30)


@jit
def bottom_of(smallest, best, share, total, slope, SIZE: tl.constexpr):
    """All of SIZE logits below this weigh less than half of what top_p drops."""
    gap = (tl.log2(SIZE / ((1 - share) * total)) + 1) / slope
    return slightly_below(tl.maximum(smallest, best - gap))


@jit
def rounded_product(a, b):
    """Rounded before it is added to another.

    Fused with the sum over lanes that follows, each lane would round its own product
    away and find another sum; but a loop must end in all lanes at once.
    """
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1
    )


@jit
def row_stats(largest_ptr, total_ptr, row, slope, PARTS: tl.constexpr, N: tl.constexpr):
    """The best logit of a row, and the weight of each chunk."""
    part = tl.arange(0, N)
    at = row.to(tl.int64) * PARTS + part
    largest = tl.load(largest_ptr + at, part < PARTS, -float("inf"))
    total = tl.load(total_ptr + at, part < PARTS, 0.0)
    best = tl.max(largest, 0)
    return best, rounded_product(total, weight_of(largest, best, slope))
