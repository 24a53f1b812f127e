"""Which tile a program takes, and which blocks of keys its queries see."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxkern.pallas.attention.attention.problem import ROWS, Problem

CACHED_BYTES = 2**24  # of keys and values of one section; of 2**25 it is slower


def place(index: Any, c: Problem, taken_in_turn: bool = False) -> tuple[Any, Any, Any]:
    """(batch, head, block) of a tile: by sections of heads, the longest first.

    Where programs share the values of a head, it is `head * c.parts + part`. A program
    that takes several tiles has as much to do as the others if lengths do not jump
    between sections: every other one begins with its shortest, not the last one.
    """
    heads = c.b * c.n * c.parts
    rows = c.s if c.window is None else min(c.s, c.window + c.block_q)
    cached = max(1, CACHED_BYTES // (2 * rows * (c.h + c.hv))) * c.group
    section = min(cached, heads)
    part = lax.div(index, section * c.blocks)
    within = lax.rem(index, section * c.blocks)
    present = lax.min(section, heads - part * section)
    block = lax.div(within, present)
    if c.causal:
        down = c.blocks - 1 - block
        if taken_in_turn and (sections := -(-heads // section)) > 1:
            block = jnp.where(lax.rem(sections - 1 - part, 2) == 0, down, block)
        else:
            block = down
    head = part * section + lax.rem(within, present)
    return lax.div(head, c.n * c.parts), lax.rem(head, c.n * c.parts), block


def nth_tile(i: Any, program: Any, c: Problem) -> Any:
    """Index of the tile that a program takes i-th: back and forth between them."""
    back = c.programs - 1 - program
    return i * c.programs + jnp.where(lax.rem(i, 2) == 0, program, back)


def position_and_length(batch, lengths_ref, offset_ref, c: Problem):
    length = c.s if lengths_ref is None else lax.min(lengths_ref[batch], c.s)
    offset = c.s - c.t if offset_ref is None else offset_ref[batch]
    return offset, length


def key_blocks(
    batch, block, lengths_ref, offset_ref, bounds_ref, c: Problem, consumer=None
):
    """The blocks to visit: [first, last), of these [whole, whole_end) without a mask.

    At least one: a tile that sees nothing visits a block of which all is masked.
    `consumer`: those of its queries alone.
    """
    offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
    start, stop, whole_start, whole_stop = 0, length, 0, length
    position, rows = block * c.block_q + offset, c.block_q
    if consumer is not None:
        position, rows = position + consumer * ROWS, ROWS
    if c.causal:
        stop = lax.min(length, position + rows)
        whole_stop = lax.min(length, position + 1)
    if c.window is not None:
        start = position - c.window + 1
        whole_start = position + rows - c.window

    limits, at = (start, stop, whole_start, whole_stop), (batch, block)
    first, whole, whole_end, last = visited(limits, c.block_k, bounds_ref, at)
    last = lax.max(last, jnp.int32(1))
    first = lax.min(first, last - 1)
    return first, whole, whole_end, last


def visited(limits, size, bounds_ref, at):
    """(first, whole, whole_end, last) in blocks of `size` rows.

    From the rows that some pair and that all pairs may see, and from the bounds that
    segments set to the block `at`.
    """
    start, stop, whole_start, whole_stop = limits

    def blocks(row, round_up=0):
        row = lax.max(jnp.int32(0), jnp.int32(row)) + round_up * (size - 1)
        return lax.div(row, jnp.int32(size))

    first, last = blocks(start), blocks(stop, 1)
    whole, whole_end = blocks(whole_start, 1), blocks(whole_stop)
    if bounds_ref is not None:
        first = lax.max(first, bounds_ref[*at, 0])
        whole = lax.max(whole, bounds_ref[*at, 1])
        whole_end = lax.min(whole_end, bounds_ref[*at, 2])
        last = lax.min(last, bounds_ref[*at, 3])
    return first, whole, whole_end, last
