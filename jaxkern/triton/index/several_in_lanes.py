"""The few largest elements of the groups that few_largest.py takes, several in a lane.

A lane has its elements in order, so that only its first is looked at; where that one is
taken, the next comes up. This replaces two levels of smaller groups, for each of which
as many elements are taken one by one.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

from jaxkern.gpu.triton_call import constexpr_function, jit, tl
from jaxkern.triton.index.few_largest import ranked
from jaxkern.triton.index.threshold import ordered_bits


@jit
def places_of_largest(key, place, K: tl.constexpr, LOWEST: tl.constexpr):
    """The places of the k largest keys of a row, the largest first, as a tuple."""
    taken = ()
    for _ in tl.static_range(K):
        top = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == top, place, 0x7FFFFFFF), 1)[:, None]
        taken = taken + (at,)
        key = tl.where(place == at, LOWEST, key)
    return taken


@constexpr_function
def groups_of(nth, lanes, size, chosen):
    """The first and the last but one of the groups that the nth elements belong to."""
    return nth * lanes // size, min(-(-(nth + 1) * lanes // size), chosen)


@jit
def dealt(taken, lane, NTH: tl.constexpr, C: tl.constexpr):
    """The place of each lane's nth element of these groups, or one behind the row."""
    SIZE: tl.constexpr = C.sizes[0]
    LANES: tl.constexpr = lane.shape[1]
    GROUPS: tl.constexpr = groups_of(NTH, LANES, SIZE, C.chosen)
    FIRST: tl.constexpr = GROUPS[0]
    END: tl.constexpr = GROUPS[1]
    element = lane + NTH * LANES
    place = lane * 0 + C.columns
    for i in tl.static_range(FIRST, END):
        at = taken[i] * SIZE + element % SIZE
        place = tl.where(element // SIZE == i, at, place)
    return place


@jit
def in_order(keys, places, EACH: tl.constexpr):
    """The elements of each lane, the largest first; of equal ones the first place."""
    for done in tl.static_range(1, EACH):
        for i in tl.static_range(EACH):
            if i < EACH - done:
                a, b, p, q = keys[i], keys[i + 1], places[i], places[i + 1]
                swap = (b > a) | ((b == a) & (q < p))
                both = (tl.where(swap, b, a), tl.where(swap, a, b))
                keys = keys[:i] + both + keys[i + 2 :]
                both = (tl.where(swap, q, p), tl.where(swap, p, q))
                places = places[:i] + both + places[i + 2 :]
    return keys, places


@jit
def next_where(won, elements, END):
    """The elements of each lane, one further where it has won."""
    COUNT: tl.constexpr = len(elements)
    moved = ()
    for i in tl.static_range(1, COUNT):
        moved = moved + (tl.where(won, elements[i], elements[i - 1]),)
    return moved + (tl.where(won, END, elements[COUNT - 1]),)


@jit
def largest_of_several(x_ptr, taken, lane, C: tl.constexpr):
    """The place of the i-th largest element of the groups `taken` in lane i."""
    EACH: tl.constexpr = C.each
    K: tl.constexpr = C.chosen
    keys, places = (), ()
    for i in tl.static_range(EACH):
        place = dealt(taken, lane, i, C)
        key = ordered_bits(ranked(x_ptr, None, place, C))
        keys = keys + (tl.where(place < C.columns, key, C.lowest),)
        places = places + (place,)
    keys, places = in_order(keys, places, EACH)
    found = lane * 0 + C.columns
    for nth in tl.static_range(K):
        top = tl.max(keys[0], 1)[:, None]
        at = tl.min(tl.where(keys[0] == top, places[0], 0x7FFFFFFF), 1)[:, None]
        found = tl.where(lane == nth, at, found)
        won = places[0] == at
        keys = next_where(won, keys, C.lowest)
        places = next_where(won, places, C.columns)
    return found
