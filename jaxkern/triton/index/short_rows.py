"""top_k of rows that a warp has in registers, as routers have them.

Of many rows, and of those longer than 256, a warp takes each by groups, as
few_largest.py and several_in_lanes.py have it. Otherwise, and where more than 8 are
taken, all elements are looked at together: that is more work, but less of it one after
the other. Only longer rows of float32 are divided there, k groups of which are read
again. 16-bit numbers share a word with their place: taking one is one reduction.
"""

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import WARP, next_power_of_2
from jaxkern.gpu.triton_call import gl, gluon_jit, jit, tl, triton_call
from jaxkern.triton.index.few_largest import (
    LOWEST,
    PLACE,
    WARPS,
    Levels,
    elements_each,
    few_of_lanes,
    group_keys,
    group_sizes,
    groups_pay,
    member_layout,
    pairs_layout,
    parts_of_largest,
    rows_and_lanes,
    take_largest,
    take_packed,
)
from jaxkern.triton.index.several_in_lanes import (
    largest_of_several,
    places_of_largest,
)
from jaxkern.triton.index.threshold import ordered_bits


@gluon_jit
def by_groups_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    C: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    LANES: gl.constexpr,
):
    """A warp has a row."""
    LAYOUT: gl.constexpr = pairs_layout(C.step, gl.num_warps())
    MEMBERS: gl.constexpr = member_layout(C.step, gl.num_warps())
    row, lane = rows_and_lanes(ROWS, BLOCK, LANES, LAYOUT)
    x_ptr += row * C.columns
    group = lane
    if C.each > 1:
        member = gl.arange(0, min(C.sizes[0], C.step), MEMBERS)[None, None, :]
        key = group_keys(x_ptr, None, group, member, C, C.sizes[0])
        taken = places_of_largest(key, group, C.chosen, C.lowest)
        group = largest_of_several(x_ptr, taken, lane, C)
    else:
        for i in gl.static_range(len(C.sizes) - 1):
            member = gl.arange(0, min(C.sizes[i], C.step), MEMBERS)[None, None, :]
            key = group_keys(x_ptr, None, group, member, C, C.sizes[i])
            _, group = parts_of_largest(key, group, lane, C, C.sizes[i], C.sizes[i + 1])
    wanted = group < C.columns
    out = row * C.chosen + lane
    gl.store(indices_ptr + out, group, wanted)
    gl.store(values_ptr + out, gl.load(x_ptr + group, wanted, 0.0), wanted)


@jit
def all_together_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    ROWS: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOWEST: tl.constexpr,
    PLACE: tl.constexpr,
):
    """A warp has BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = (row < ROWS)[:, None]
    x_ptr += row.to(tl.int64)[:, None] * V
    place = tl.arange(0, N)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    inside = present & (place < V)
    x = tl.load(x_ptr + place, inside, 0.0)
    key = tl.where(inside, ordered_bits(x.to(tl.float32)), LOWEST)
    if x_ptr.dtype.element_ty.primitive_bitwidth == 16:
        packed = (key & ~PLACE) | (PLACE - place)
        _, index = take_packed(packed, slot, K, LOWEST, PLACE)
    elif SIZE == 1:
        _, index = take_largest(key, place, slot, K, LOWEST)
    else:
        maxima = tl.max(tl.reshape(key, (BLOCK, N // SIZE, SIZE)), 2)
        group = tl.arange(0, N // SIZE)[None, :]
        _, group = take_largest(maxima, group, slot, K, LOWEST)
        # what fills up the slots would name a group again
        group = tl.where(slot < K, group, N // SIZE + slot)
        at = group[:, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
        at = tl.reshape(at, (BLOCK, SLOTS * SIZE))
        inside = present & (at < V)
        key = ordered_bits(tl.load(x_ptr + at, inside, 0.0).to(tl.float32))
        key = tl.where(inside, key, LOWEST)
        _, index = take_largest(key, at, slot, K, LOWEST)
    wanted = present & (slot < K)
    out = row.to(tl.int64)[:, None] * K + slot
    tl.store(indices_ptr + out, index, wanted)
    tl.store(values_ptr + out, tl.load(x_ptr + index, wanted, 0.0), wanted)


def top_k_of_short_rows(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    v = x.shape[-1]
    if groups_pay(x.size // v, v) and few_of_lanes(v, k, x.dtype.itemsize):
        return by_groups(x, k)
    return all_together(x, k)


def by_groups(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    *lead, v = x.shape
    rows = x.size // v
    c = Levels(
        v,
        k,
        group_sizes(v, k),
        step=16 // x.dtype.itemsize,
        each=elements_each(v, k) if x.dtype.itemsize == 4 else 1,
        packed=x.dtype.itemsize == 2,
    )
    values, indices = triton_call(
        by_groups_kernel,
        x,
        out=[
            jax.ShapeDtypeStruct((*lead, k), x.dtype),
            jax.ShapeDtypeStruct((*lead, k), jnp.int32),
        ],
        grid=(-(-rows // WARPS),),
        C=c,
        ROWS=rows,
        BLOCK=WARPS,
        LANES=WARP,
        num_warps=WARPS,
    )
    return values, indices


def all_together(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    *lead, v = x.shape
    rows, n = x.size // v, max(next_power_of_2(v), 32)
    slots, size = next_power_of_2(k), 1
    while n > 256 and size * size * slots < n:  # as many groups as elements of k
        size *= 2
    # one warp: what several share goes through shared memory
    together = 2 if n <= 256 else 1
    values, indices = triton_call(
        all_together_kernel,
        x,
        out=[
            jax.ShapeDtypeStruct((*lead, k), x.dtype),
            jax.ShapeDtypeStruct((*lead, k), jnp.int32),
        ],
        grid=(-(-rows // together),),
        ROWS=rows,
        V=v,
        K=k,
        N=n,
        SLOTS=slots,
        LOWEST=LOWEST,
        PLACE=PLACE,
        SIZE=size,
        BLOCK=together,
        num_warps=1,
    )
    return values, indices
