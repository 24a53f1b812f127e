"""The few largest elements of a row, group by group, by one warp.

A lane has a group of neighbours, and its largest element as an integer. The k groups
with the largest are taken one by one; the smaller groups that they consist of are dealt
to the lanes again, until a group is one element. An element outside of the k groups has
k before it: larger ones, or equal ones with smaller indices.

Integer instructions decide, of which a multiprocessor does half as many as of products.
They are one for each element of the first groups, and six for each one that is taken,
where they are six for each element that the lane has when no groups are made.
"""

import dataclasses

from jaxkern.gpu.device import WARP, next_power_of_2
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit, jit, tl
from jaxkern.triton.index.threshold import ordered_bits

LOWEST = -0x80000000  # below the integer of every float
PLACE = 0x1FFF  # the bits of a word that a 16-bit number leaves
MOST_TAKEN = 8  # a lane for each of four parts of a group that is taken
SHORTEST, LONGEST = 4 * WARP, 16 * WARP  # rows of which a lane has 4 to 16 elements
STEP = 4  # neighbours that a lane reads at once
LONG = 256  # a longer row is sooner done by groups, however few there are
MANY_ROWS = 2048  # of others, from which on instructions decide
WARPS = 4  # of a program; one warp would leave half of a multiprocessor's places empty


@dataclasses.dataclass(frozen=True)
class Levels:
    """What is static of a choice among the elements of a row.

    Attributes:
      columns: elements of a row, of which `chosen` are taken.
      sizes: of the groups of each level, then 1 for what is taken at last.
      step: neighbours that a lane reads at once.
      sigmoid: elements are ordered by their sigmoid, not by themselves.
      packed: an element leaves the bits `place` of its integer, which has its place.
      lowest: below the integer of every float.
      each: elements of a lane of the groups of the first level; 1 with more levels.
    """

    columns: int
    chosen: int
    sizes: tuple[int, ...]
    step: int
    sigmoid: bool = False
    packed: bool = False
    lowest: int = LOWEST
    place: int = PLACE
    each: int = 1


def few_of_lanes(columns: int, chosen: int, itemsize: int) -> bool:
    """Whether a warp can take a row: divided evenly among its lanes."""
    short = SHORTEST <= next_power_of_2(columns) <= LONGEST
    aligned = columns * itemsize % 16 == 0
    return chosen <= MOST_TAKEN and short and aligned


def groups_pay(rows: int, columns: int) -> bool:
    """Whether a row is sooner done by groups."""
    return columns > LONG or rows >= MANY_ROWS


def group_sizes(columns: int, chosen: int) -> tuple[int, ...]:
    """Of a lane's elements, then of the parts that all taken groups have for lanes."""
    parts = WARP // next_power_of_2(chosen)
    sizes = [next_power_of_2(columns) // WARP]
    while sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] // parts))
    return *sizes, 1


def elements_each(columns: int, chosen: int) -> int:
    """How many elements of the taken groups a lane has in the place of smaller groups.

    Four take as long to put in order as smaller groups would.
    """
    each = -(-chosen * group_sizes(columns, chosen)[0] // WARP)
    return each if each < 4 else 1


@jit
def larger(a, b):
    """NaN is larger than any number."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def ranked(x_ptr, bias_ptr, at, C: tl.constexpr):
    """What the elements `at` of a row are ordered by; -inf behind its end."""
    inside = at < C.columns
    rank = tl.load(x_ptr + at, inside, -float("inf")).to(tl.float32)
    if C.sigmoid:
        rank = tl.sigmoid(rank)
    if bias_ptr is not None:
        rank += tl.load(bias_ptr + at, inside, 0.0).to(tl.float32)
    if C.sigmoid:
        rank = tl.where(inside, rank, -float("inf"))
    return rank


@jit
def group_maxima(x_ptr, bias_ptr, group, member, C: tl.constexpr, SIZE: tl.constexpr):
    """float32 `[rows, groups]`: the largest of the SIZE elements of each group."""
    if SIZE == 1:
        return ranked(x_ptr, bias_ptr, group, C)
    first = (group * SIZE)[:, :, None] + member
    best = ranked(x_ptr[:, :, None], bias_ptr, first, C)
    for i in tl.static_range(member.shape[2], SIZE, member.shape[2]):
        best = larger(best, ranked(x_ptr[:, :, None], bias_ptr, first + i, C))
    return tl.reduce(best, 2, larger)


@jit
def group_keys(x_ptr, bias_ptr, group, member, C: tl.constexpr, SIZE: tl.constexpr):
    """Integers in the order of these maxima."""
    key = ordered_bits(group_maxima(x_ptr, bias_ptr, group, member, C, SIZE))
    if C.packed:
        PLACE: tl.constexpr = C.place
        key = (key & ~PLACE) | (PLACE - group)
    return tl.where(group * SIZE < C.columns, key, C.lowest)


@jit
def take_largest(key, place, nth, K: tl.constexpr, LOWEST: tl.constexpr):
    """The i-th largest key of a row and its place where `nth` is i, for i below K.

    Of equal keys the one at the first place is larger.
    """
    keys = nth * 0
    places = nth * 0
    for i in tl.static_range(K):
        top = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == top, place, 0x7FFFFFFF), 1)[:, None]
        keys = tl.where(nth == i, top, keys)
        places = tl.where(nth == i, at, places)
        key = tl.where(place == at, LOWEST, key)
    return keys, places


@jit
def take_packed(key, nth, K: tl.constexpr, LOWEST: tl.constexpr, PLACE: tl.constexpr):
    """Likewise of keys that no two elements share, since they hold the places."""
    keys = nth * 0
    for i in tl.static_range(K):
        top = tl.max(key, 1)[:, None]
        keys = tl.where(nth == i, top, keys)
        key = tl.where(key == top, LOWEST, key)
    return keys, PLACE - (keys & PLACE)


@jit
def parts_of_largest(
    key, group, lane, C: tl.constexpr, SIZE: tl.constexpr, NEXT: tl.constexpr
):
    """Keys of the groups that are taken, and a part of NEXT elements for each lane.

    A lane without a part has one behind the row.
    """
    K: tl.constexpr = C.chosen
    PARTS: tl.constexpr = SIZE // NEXT
    nth = lane // PARTS
    if C.packed:
        keys, taken = take_packed(key, nth, K, C.lowest, C.place)
    else:
        keys, taken = take_largest(key, group, nth, K, C.lowest)
    return keys, tl.where(nth < K, taken * PARTS + lane % PARTS, C.columns)


@constexpr_function
def lanes_layout(step, warps):
    """[rows, lanes, step]: a warp has whole rows, a lane what it reads at once."""
    return gl.BlockedLayout([1, 1, step], [1, WARP, 1], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def pairs_layout(step, warps):
    """[rows, lanes] of these."""
    return gl.SliceLayout(2, lanes_layout(step, warps))


@constexpr_function
def member_layout(step, warps):
    """[step] of these."""
    return gl.SliceLayout(0, gl.SliceLayout(1, lanes_layout(step, warps)))


@gluon_jit
def rows_and_lanes(
    ROWS: gl.constexpr, BLOCK: gl.constexpr, LANES: gl.constexpr, LAYOUT: gl.constexpr
):
    """`[rows, 1]`, of which some are the last one again, and `[1, lanes]`."""
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.minimum(gl.program_id(0) * BLOCK + row, ROWS - 1)
    lane = gl.arange(0, LANES, gl.SliceLayout(0, LAYOUT))[None, :]
    return row.to(gl.int64), lane
