"""The k largest elements of a row.

Of short rows a few are taken one by one, in registers: short_rows.py. Of long rows they
are found by counting, then k of them are sorted:

    maxima   the largest of every group of a row, from memory, by many programs
    top_k    one program a row: groups with the largest maxima hold the k largest
             elements, so only they are read again; of those some more than k are
             counted out and sorted

Where too many groups or elements tie at the border the first are taken: an element of a
later one has k elements before it that are larger, or equal with a smaller index.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, tl, triton_call
from jaxkern.triton.index.few_largest import LOWEST
from jaxkern.triton.index.short_rows import top_k_of_short_rows
from jaxkern.triton.index.threshold import (
    largest_threshold,
    order_within,
    ordered_bits,
)

CHUNK = 4096  # elements of one program of the first launch
IN_REGISTERS = 16_384  # groups of a row, and elements of the k groups
SHORTEST = 4096  # of the rows in which elements are counted
FEW_TAKEN = 16  # elements of a shorter row that are taken one by one
LARGEST_K = 1024
FEW = 128  # up to 2 * k elements are sorted, which is less work than counting out k
LONGEST = 262_144


def unsupported(*, x: Any, k: int, **named: Any) -> str | None:
    v = x.shape[-1] if x.shape else 1
    if not 1 <= k <= LARGEST_K:
        return f"k is {k}, not from 1 to {LARGEST_K}"
    if v > LONGEST:
        return f"a row of `x` has {v} elements, more than {LONGEST}"
    if v < SHORTEST and k > FEW_TAKEN:
        return f"k is {k}, more than {FEW_TAKEN} of a row of only {v} elements"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"`x` is {x.dtype.name}"
    return bridge.unsupported(x=x, **named)


def group_size(v: int, k: int) -> int:
    """As many groups in a row as elements in k groups, where both fit."""
    size = 4
    while 2 * size * size * k <= v or next_power_of_2(-(-v // size)) > IN_REGISTERS:
        size *= 2
    return min(size, 128)


@jit
def maxima_kernel(
    x_ptr,
    maxima_ptr,
    V: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest element of each group, as an integer."""
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    part = tl.program_id(0) % PROGRAMS * (CHUNK // SIZE) + tl.arange(0, CHUNK // SIZE)
    at = part[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + row * V + at, at < V, -float("inf")).to(tl.float32)
    out = maxima_ptr + row * PARTS + part[:, None]
    tl.store(out, tl.max(ordered_bits(x), 1, keep_dims=True), part[:, None] < PARTS)


@jit
def top_k_kernel(
    x_ptr,
    maxima_ptr,
    values_ptr,
    indices_ptr,
    groups_ptr,
    keys_ptr,
    places_ptr,
    V: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    LOWEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * V
    # the lists of this program
    groups_ptr += row * SLOTS
    keys_ptr += row * SLOTS
    places_ptr += row * SLOTS
    slot = tl.arange(0, SLOTS)

    group = tl.arange(0, N)
    present = group < PARTS
    maxima = tl.load(maxima_ptr + row * PARTS + group, present, LOWEST)
    high = tl.max(maxima, 0)
    every = tl.full([], PARTS, tl.int32)
    one = present.to(tl.int32)
    cut = largest_threshold(maxima, one, K, SLOTS, tl.min(maxima, 0), high, every)
    chosen = present & (maxima >= cut)
    count = tl.sum(chosen.to(tl.int32), 0)
    if count > SLOTS:
        above = present & (maxima > cut)
        room = SLOTS - tl.sum(above.to(tl.int32), 0)
        equal = chosen & (maxima == cut)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        count = tl.full([], SLOTS, tl.int32)
    tl.store(groups_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, chosen)
    tl.debug_barrier()

    groups = tl.load(groups_ptr + slot, slot < count, 0)
    at = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (slot < count)[:, None] & (at < V)
    key = ordered_bits(tl.load(x_ptr + at, inside, 0.0).to(tl.float32))
    one_each = inside.to(tl.int32)
    count = tl.sum(tl.where(key >= cut, one_each, 0))
    cut = largest_threshold(key, one_each, K, SLOTS, cut, high, count)
    listed = inside & (key >= cut)
    count = tl.sum(listed.to(tl.int32))
    if count > SLOTS:
        beyond = inside & (key > cut)
        left = SLOTS - tl.sum(beyond.to(tl.int32))
        level = inside & (key == cut)
        listed = beyond | (level & (order_within(level) < left))
        count = tl.full([], SLOTS, tl.int32)
    place = order_within(listed)
    tl.store(keys_ptr + place, key, listed)
    tl.store(places_ptr + place, at, listed)
    tl.debug_barrier()

    # by falling key, then by slot: slots are in the order of the row
    keys = tl.load(keys_ptr + slot, slot < count, LOWEST).to(tl.int64)
    order = tl.sort((-keys << 16) + slot)
    nth = (order & 0xFFFF).to(tl.int32)
    index = tl.load(places_ptr + nth, slot < K, 0)
    out = row * K + slot
    tl.store(indices_ptr + out, index, slot < K)
    tl.store(values_ptr + out, tl.load(x_ptr + index, slot < K, 0.0), slot < K)


def top_k(x: jax.Array, *, k: int) -> tuple[jax.Array, jax.Array]:
    *lead, v = x.shape
    rows, size = x.size // v, group_size(v, next_power_of_2(k))
    if rows == 0:
        return jnp.zeros((*lead, k), x.dtype), jnp.zeros((*lead, k), jnp.int32)
    if v < SHORTEST:
        return top_k_of_short_rows(x, k)
    parts, programs = -(-v // size), -(-v // CHUNK)
    [maxima] = triton_call(
        maxima_kernel,
        x,
        out=[jax.ShapeDtypeStruct((rows, parts), jnp.int32)],
        grid=(rows * programs,),
        V=v,
        PROGRAMS=programs,
        PARTS=parts,
        SIZE=size,
        CHUNK=CHUNK,
        num_warps=8,
    )
    slots = max(next_power_of_2(2 * k if k <= FEW else k), 16)
    scratch = jax.ShapeDtypeStruct((rows, slots), jnp.int32)
    n = next_power_of_2(parts)
    values, indices, *_ = triton_call(
        top_k_kernel,
        x,
        maxima,
        out=[
            jax.ShapeDtypeStruct((*lead, k), x.dtype),
            jax.ShapeDtypeStruct((*lead, k), jnp.int32),
            *(scratch, scratch, scratch),
        ],
        grid=(rows,),
        V=v,
        K=k,
        PARTS=parts,
        N=n,
        SIZE=size,
        SLOTS=slots,
        LOWEST=LOWEST,
        num_warps=min(max(max(n, slots * size) // 512, 8), 32),
    )
    return values, indices
