"""Gradients of attention on Hopper: which blocks meet, P and dS, products."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.blocks import position_and_length, visited
from jaxkern.pallas.attention.attention.masks import FAR, up_to
from jaxkern.pallas.attention.attention.pairs import BY_COLUMN, BY_ROW, LOG2_E, is_set
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import (
    WGMMA,
    by_row,
    finished_sum,
    issue_sum,
    set_sum,
)

BLOCK = 64  # rows of the matrices that are walked over
CONSUMERS = 2
KEYS = CONSUMERS * ROWS  # of a program that holds keys
STAGES = 2
SHIFT = 15  # 2 to that scales weights that are kept in 16 bits
NARROW = 256  # head dims together, with which registers hold S and dP at once
CACHED_BYTES = 2**25  # of the L2 cache, for queries and cotangents of one section
P_SLOTS = 2  # tiles of weights between the consumers


# Which blocks meet.


def heads_at_once(c: Problem, keys: int = KEYS) -> int:
    """Key heads of a section: their queries and cotangents fit the cache."""
    rows = c.t if c.window is None else min(c.t, c.window + keys)
    cached = CACHED_BYTES // (2 * rows * c.group * (c.h + c.hv))
    return min(max(1, cached), c.b * (c.n // c.group))


def place_keys(index, c: Problem, keys: int = KEYS):
    """(batch, key head, block of keys) of a program, by sections of heads."""
    heads, section = c.b * (c.n // c.group), heads_at_once(c, keys)
    blocks = -(-c.s // keys)
    part = lax.div(index, jnp.int32(section * blocks))
    within = lax.rem(index, jnp.int32(section * blocks))
    present = lax.min(section, heads - part * section)
    head = part * section + lax.rem(within, present)
    kv_heads = jnp.int32(c.n // c.group)
    # the first blocks see the most queries
    return lax.div(head, kv_heads), lax.rem(head, kv_heads), lax.div(within, present)


def in_order(first, whole, whole_end, last):
    """The same blocks with first <= whole <= whole_end <= last."""
    last = lax.max(first, last)
    whole = lax.min(lax.max(whole, first), last)
    return first, whole, lax.max(lax.min(whole_end, last), whole), last


def inside(blocks, part):
    """Of a program's blocks those that a consumer needs."""
    first, _, _, last = blocks
    return in_order(*(lax.min(lax.max(x, first), last) for x in part))


def query_blocks(
    batch,
    block,
    lengths_ref,
    offset_ref,
    bounds_ref,
    c: Problem,
    keys: int = KEYS,
    rows: int = BLOCK,
    part=None,
):
    """The blocks of `rows` queries that see some of the keys: [first, last).

    Of these [whole, whole_end) see all keys of the block. `part`: of 64 of them alone.
    """
    offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
    column = block * keys
    if part is not None:
        column, keys = column + part * ROWS, ROWS
    end = -(-c.t // rows) * rows  # rows behind t have no weights
    start, stop, whole_start, whole_stop = 0, end, 0, end
    if c.causal:
        start = column - offset
        whole_start = start + keys - 1
    if c.window is not None:
        stop = lax.min(end, column + keys - 1 + c.window - offset)
        whole_stop = lax.min(end, column + c.window - offset)
    stop = jnp.where(column < length, stop, 0)
    whole_stop = jnp.where(column + keys <= length, whole_stop, 0)

    limits, at = (start, stop, whole_start, whole_stop), (batch, block)
    return in_order(*visited(limits, rows, bounds_ref, at))


def back_and_forth(n, kv_head, member, blocks, c: Problem):
    """The n-th block to visit of the queries of a head of the group.

    Where causal sections are single heads, every other head of every other group is
    visited from its last block on, masks aside. The programs of a group, which start
    together or one after another, then are at the same queries at more nearly the same
    time: the cache does not hold all that they read and add to.
    """
    if not c.causal or c.window is not None or heads_at_once(c) > 1:
        return n
    _, whole, whole_end, _ = blocks
    two = jnp.int32(2)
    turned = jnp.logical_and(lax.rem(kv_head, two) == 0, lax.rem(member, two) == 1)
    inside = jnp.logical_and(n >= whole, n < whole_end)
    turned = jnp.logical_and(turned, inside)
    return jnp.where(turned, whole + whole_end - 1 - n, n)


def walk(step, carry, blocks, begins: bool, ends: bool):
    """step(j, carry, masked) for all blocks; only those at the ends are masked."""
    first, whole, whole_end, last = blocks
    masked = functools.partial(step, masked=True)
    if begins:
        carry = lax.fori_loop(first, whole, masked, carry)
    plain = functools.partial(step, masked=False)
    carry = lax.fori_loop(whole, whole_end, plain, carry)
    if ends:
        carry = lax.fori_loop(whole_end, last, masked, carry)
    return carry


def walk_part(step, skip, carry, blocks, part, **ends):
    """As `walk` for the `part` of the blocks that a consumer needs; skip(j) others."""
    (first, _, _, last), (begin, _, _, end) = blocks, part
    lax.fori_loop(first, begin, skip, None)
    carry = walk(step, carry, part, **ends)
    lax.fori_loop(end, last, skip, None)
    return carry


def walk_heads(
    step,
    carry,
    blocks,
    lengths_ref,
    bounds_ref,
    c: Problem,
    keys: int,
    members=None,
    part=None,
    skip: Any = None,
):
    """step(j, carry, masked, member) for the queries of every head of the group.

    `members`: of so many. `part` and `skip(j, None, member)` as in walk_part.
    """
    ragged = lengths_ref is not None or c.s % keys != 0
    bounded = bounds_ref is not None

    def head(member, carry):
        of_head = functools.partial(step, member=member)
        ends = dict(
            begins=c.causal or bounded,
            ends=ragged or c.window is not None or bounded,
        )
        if part is None:
            return walk(of_head, carry, blocks, **ends)
        skipped = functools.partial(skip, member=member)
        return walk_part(of_head, skipped, carry, blocks, part, **ends)

    return lax.fori_loop(0, c.group if members is None else members, head, carry)


def visible(
    shape, key_axis, first_key, first_query, offset, length, c: Problem, interpret
):
    """Which pairs of a block see each other, segments and mask aside."""
    rows = plgpu.broadcasted_iota(jnp.int32, (shape[0],), 0, layout=BY_ROW)
    first = first_query + offset - first_key  # position of a query less that of a key
    if key_axis == 1:
        last = rows + first if c.causal else rows + FAR
        last = jnp.minimum(last, length - first_key - 1)
        before = rows + first - (c.window or 0)
        seen = up_to(last, shape, interpret)
        if c.window is None:
            return seen
        return jnp.logical_and(seen, up_to(before, shape, interpret, beyond=True))
    before = rows - first - 1 if c.causal else rows - FAR
    before = jnp.where(rows < length - first_key, before, FAR)
    seen = up_to(before, shape, interpret, beyond=True)
    if c.window is None:
        return seen
    last = rows - first + c.window - 1
    return jnp.logical_and(seen, up_to(last, shape, interpret))


def same_ids(row_ids, column_ids_ref, shape):
    columns = plgpu.load(column_ids_ref, layout=BY_COLUMN, optimized=False)
    return by_row(row_ids, shape) == by_column(columns, shape)


def shown(seen, row_ids, column_ids_ref, words_ref, batch, head, row, column):
    """`seen` without the pairs that segments and mask hide."""
    shape = seen.shape
    if row_ids is not None:
        ids = column_ids_ref.at[batch, pl.ds(column, shape[1])]
        seen = jnp.logical_and(seen, same_ids(row_ids, ids, shape))
    if words_ref is not None:
        bits = is_set(words_ref, batch, head, row, column, shape)
        seen = jnp.logical_and(seen, bits)
    return seen


# P and dS.


def exponents(s, bias, lse2, c: Problem):
    """(log2 of the weights, tanh of the cap or None)."""
    bent = None
    z = s * c.scale
    if c.softcap is not None:
        bent = jnp.exp2(s * (2 * LOG2_E * c.scale / c.softcap))
        bent = 1.0 - 2.0 / (1.0 + bent)
        z = bent * (c.softcap * LOG2_E)
    # one fused multiply-add more than without a bias
    return z + (-lse2 if bias is None else bias * LOG2_E - lse2), bent


def weights(s, bias, lse2, seen, c: Problem):
    """(P, tanh of the cap or None), with `seen` None where all pairs see each other."""
    z, bent = exponents(s, bias, lse2, c)
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    return jnp.exp2(z), bent


def scaled_slopes(p, dp, delta):
    """dS of weights that are kept in 16 bits, times 2^SHIFT."""
    unit = 2.0**-SHIFT
    return p.astype(jnp.float32) * (dp * unit - by_column(delta * unit, dp.shape))


def slopes(p, dp, delta, bent):
    """dS."""
    ds = p * (dp - delta)
    return ds if bent is None else ds * (1.0 - bent * bent)


def dscale(c: Problem) -> float:
    """The scale, which `c.scale` is times log2 e where no cap comes after it."""
    return c.scale if c.softcap is not None else c.scale / LOG2_E


def by_column(x, shape):
    return lax.broadcast_in_dim(x, shape, [1])


# Products.


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def sum_of(shape):
    return plgpu.WGMMAAccumulatorRef(shape, jnp.float32)


def zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def product(a, b):
    """a b; both in shared memory."""

    def scoped(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    shape = sum_of((a.shape[0], b.shape[1]))
    return pl.run_scoped(scoped, shape)


def two_products(a, b, c, d):
    """a b and c d; all in shared memory."""

    def scoped(ab_ref, cd_ref):
        plgpu.wgmma(ab_ref, a, b)
        plgpu.wgmma(cd_ref, c, d)
        return plgpu.wgmma_accumulator_load(ab_ref, wait_n=1), cd_ref[...]

    shape = sum_of((a.shape[0], b.shape[1]))
    return pl.run_scoped(scoped, shape, shape)


def accumulated(sums, products, interpret):
    """sums[i] + a b, for each (a, b) of products; a in registers."""
    each = list(zip(sums, products, strict=True))

    def scoped(*refs):
        for ref, x in zip(refs, sums, strict=True):
            set_sum(ref, x, interpret)
        for ref, (a, b) in zip(refs, products, strict=True):
            issue_sum(ref, a, b, interpret)
        return [
            finished_sum(ref, x, a, b, interpret)
            for ref, (x, (a, b)) in zip(refs, each, strict=True)
        ]

    return pl.run_scoped(scoped, *(sum_of(x.shape) for x in sums))


def store(x, staged, target) -> None:
    """x to memory by way of shared memory, while what comes next is computed."""
    staged[...] = x.astype(target.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, target)
