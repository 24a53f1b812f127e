"""The logits of a block, and the softmax that goes on from block to block."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxkern.pallas.attention.attention.blocks import position_and_length
from jaxkern.pallas.attention.attention.forward_tiles import Operands, Tile
from jaxkern.pallas.attention.attention.masks import FAR, of_thread, up_to
from jaxkern.pallas.attention.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    LOG2_E,
    bias_tile,
    copied_bias,
    is_set,
)
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import by_row

GROWN = 8.0  # in powers of 2: weights up to that are as exact in 16 bits


def powers(s, top, factor, infinite):
    """2 to `factor * s - top`. `infinite`: all logits of a row may be -inf."""
    base = jnp.where(top == -jnp.inf, 0.0, top) if infinite else top
    return jnp.exp2(s * factor - by_row(base, s.shape))


def row_tops(s, top, factor):
    return lax.max(top, jnp.max(s, axis=1) * factor)


def fading(top, higher, infinite):
    """By what sums relative to `top` are scaled when they are relative to `higher`."""
    base = jnp.where(higher == -jnp.inf, 0.0, higher) if infinite else higher
    return jnp.exp2(top - base)


def scaled(x, factor):
    return x * by_row(factor, x.shape)


def any_grew(top, higher, interpret):
    """Whether a row of this warp has a maximum of more than 2**`GROWN` times `top`."""
    if interpret:
        return jnp.any(higher - top > GROWN)

    def emit(_, growth):
        i32 = ir.IntegerType.get_signless(32)
        found = llvm.inline_asm(
            i32,
            of_thread(growth),
            "{ .reg .pred a, b; "
            f"setp.gt.f32 a, $1, {GROWN}; "
            f"setp.gt.or.f32 b, $2, {GROWN}, a; "
            "vote.sync.any.pred a, b, 0xffffffff; "
            "selp.b32 $0, 1, 0, a; }",
            "=r,f,f",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    flag = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), plgpu.Layout.WG_SPLAT)
    inline: Any = plgpu.inline_mgpu(arg_types=(BY_ROW,), return_type=flag)
    return inline(emit)(higher - top) != 0


def by_eighth(x):
    """[rows, 8]: sums of every eighth column, of which a thread has all it needs."""
    parts = (x[:, at : at + 8] for at in range(0, x.shape[1], 8))
    return functools.reduce(lax.add, parts)


class Logits:
    """Of the queries of one consumer in one tile."""

    def __init__(
        self, tile: Tile, me: Any, refs: Operands, c: Problem, interpret: bool
    ):
        self.tile, self.refs, self.c, self.interpret = tile, refs, c, interpret
        self.row = tile.block * c.block_q + me * ROWS
        self.offset, self.length = position_and_length(
            tile.batch, refs.lengths, refs.offset, c
        )
        self.ragged = refs.lengths is not None or c.s % c.block_k != 0
        bounded = refs.bounds is not None
        # whether the last blocks, and the first ones, may be masked
        self.ends = c.causal or self.ragged or bounded
        self.begins = c.window is not None or bounded
        self.factor = c.scale if c.folded else 1.0 if refs.bias is None else LOG2_E
        self.q_ids = None
        if refs.q_ids is not None:
            self.q_ids = plgpu.load(
                refs.q_ids.at[tile.batch, pl.ds(self.row, ROWS)],
                layout=BY_ROW,
                optimized=False,
            )

    def infinite(self, masked: bool) -> bool:
        return masked or self.refs.bias is not None

    def visible(self, start, shape):
        """Which of the queries see which of the keys from `start` on."""
        tile, refs, c = self.tile, self.refs, self.c
        terms = []
        if c.causal or self.ragged or c.window is not None:
            terms = self.bounded(start, shape)
        if self.q_ids is not None:
            kv_ids = plgpu.load(
                refs.kv_ids.at[tile.batch, pl.ds(start, c.block_k)],
                layout=BY_COLUMN,
                optimized=False,
            )
            kv_ids = lax.broadcast_in_dim(kv_ids, shape, [1])
            terms.append(by_row(self.q_ids, shape) == kv_ids)
        if refs.words is not None:
            words = refs.words
            terms.append(is_set(words, tile.batch, tile.head, self.row, start, shape))
        return functools.reduce(jnp.logical_and, terms)

    def bounded(self, start, shape):
        """What causal, window and lengths say of it, of which there is one at least.

        Rows that nothing is compared with would have no layout.
        """
        c = self.c
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)
        position = rows + (self.row + self.offset - start)
        terms = []
        if c.causal or self.ragged:
            last = position if c.causal else rows + FAR
            if self.ragged:
                last = jnp.minimum(last, self.length - start - 1)
            terms.append(up_to(last, shape, self.interpret))
        if c.window is not None:
            before = position - c.window
            terms.append(up_to(before, shape, self.interpret, beyond=True))
        return terms

    def __call__(self, s, j, masked, copied, k_free):
        """Of block j from the end, over `factor`; s are its products.

        `copied`: the bias in shared memory, which is left to `k_free` when it is read.
        """
        tile, refs, c, factor = self.tile, self.refs, self.c, self.factor
        if c.softcap is not None:
            bent = jnp.exp2(s * (2 * LOG2_E * c.scale / c.softcap))
            s = (1.0 - 2.0 / (1.0 + bent)) * (c.softcap * LOG2_E / factor)
        elif not c.folded:
            s = s * (c.scale / factor)
        start = (tile.last - 1 - j) * c.block_k
        if copied is not None:
            s = s + copied_bias(copied)
            plgpu.barrier_arrive(k_free)
        elif refs.bias is not None:
            row, shape = self.row, s.shape
            s = s + bias_tile(refs.bias, tile.batch, tile.head, row, start, shape)
        if masked:
            s = jnp.where(self.visible(start, s.shape), s, -jnp.inf)
        return s
