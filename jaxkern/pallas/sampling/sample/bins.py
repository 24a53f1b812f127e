"""Weights of logits, as integers, added to the bins of a program.

In assembly, so that a thread can pass over logits that do not count. The interpreter
has the same in arrays.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxkern.pallas.sampling.sample.cluster_row import ClusterRow
from jaxkern.pallas.sampling.sample.exchange import (
    address_of,
    assembly,
    element,
    integer,
    lane,
    words_beyond,
)
from jaxkern.pallas.sampling.sample.plan import BINS, COPIES, LANES, WARPGROUPS

ROUND = 1.5 * 2**23  # what is added to it is rounded to an integer
WHOLE = 2.0**23  # the last bits of the sum are the integer
WHOLE_BITS = 0x4B000000
LEAST = -126.0  # as an exponent: no unit, also of NaN


def bits_of(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def whole(nearest, interpret: bool):
    """`nearest` without ROUND, which jax 0.11 folds into other terms on a CPU."""
    if interpret:
        return (bits_of(nearest) - bits_of(jnp.float32(ROUND))).astype(jnp.float32)
    return nearest - ROUND


def flipped_if_negative(bits):
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.int32(31)) & 0x7FFFFFFF)


def ordered(x):
    """Integers of the same order; -0.0 and 0.0 are equal."""
    return flipped_if_negative(bits_of(x + 0.0))


def from_ordered(bits):
    return float_of(flipped_if_negative(bits))


def units(y):
    """2**y as an integer."""
    y = jnp.exp2(jnp.where(y > LEAST, y, LEAST)) + WHOLE
    return bits_of(y) - WHOLE_BITS


# 2**r as an integer n; the address of bin a
UNITS = f"""
    max.f32 r, r, 0fC2FC0000; ex2.approx.ftz.f32 r, r;
    add.rn.f32 r, r, 0f{WHOLE_BITS:08X}; mov.b32 n, r; sub.u32 n, n, {WHOLE_BITS};
    mad.lo.u32 a, a, {4 * COPIES}, $0;"""


class Even(NamedTuple):
    """Bins of equal width below the best logit; the last has all that is lower.

    That weighs nothing: 48 octaves less. Without a branch logits overlap in time.
    """

    first: Any  # the bits of the best, rounded
    inverse: Any  # of the width, which is a power of 2
    octaves: Any  # of a bin
    middle: Any  # log2 of the units of a logit in the middle of its bin

    @staticmethod
    def assembly(logits: list[str], options: list[str]) -> str:
        first, inverse, octaves, middle = options
        each = "".join(
            f"""fma.rn.f32 t, {x}, {inverse}, 0f4B400000; mov.b32 a, t;
            sub.s32 a, {first}, a; min.u32 a, a, {BINS - 1};
            sub.rn.f32 t, 0f4B400000, t; fma.rn.f32 r, {x}, {inverse}, t;
            fma.rn.f32 r, r, {octaves}, {middle}; {UNITS}
            red.shared.add.u32 [a], n;"""
            for x in logits
        )
        return f"{{ .reg .b32 a, n; .reg .f32 t, r; {each} }}"

    def in_arrays(self, x):
        nearest = x * self.inverse + ROUND
        beside = x * self.inverse - whole(nearest, True)
        bin_ = self.first - bits_of(nearest)
        bin_ = jnp.where((bin_ < 0) | (bin_ >= BINS), BINS - 1, bin_)
        return bin_, units(beside * self.octaves + self.middle)


def for_those_inside(logits: list[str], options: list[str], bin_of: str) -> str:
    """Most threads have no logit inside; those that do add others to no bin.

    A predicate there would be a branch each in machine code, one after the other.

    `bin_of` has the logit as X.
    """
    lowest, highest, top, slope, fixed = options
    inside = "".join(
        f"setp.ge.f32 p{i}, {x}, {lowest}; "
        f"setp.le.and.f32 p{i}, {x}, {highest}, p{i}; or.pred any, any, p{i}; "
        for i, x in enumerate(logits)
    )
    each = "".join(
        f"""{bin_of.replace("X", x)} sub.rn.f32 r, {x}, {top};
        fma.rn.f32 r, r, {slope}, {fixed}; {UNITS}
        selp.b32 a, a, nowhere, p{i}; red.shared.add.u32 [a], n;"""
        for i, x in enumerate(logits)
    )
    return f"""{{ .reg .pred any, p<{len(logits)}>; .reg .b32 a, n, nowhere;
        .reg .f32 t, r; setp.ne.u32 any, 0, 0; {inside} @!any bra OUT;
        mov.u32 nowhere, %laneid; and.b32 nowhere, nowhere, {-COPIES & (LANES - 1)};
        mad.lo.u32 nowhere, nowhere, 4, $0;
        add.u32 nowhere, nowhere, {4 * COPIES * BINS}; {each}
        OUT: }}"""


class Finer(NamedTuple):
    """Bins of equal width in one of the bins before."""

    lowest: Any
    highest: Any
    first: Any  # the bits of the upper end, rounded
    inverse: Any  # of the width
    top: Any
    slope: Any
    fixed: Any

    @staticmethod
    def assembly(logits: list[str], options: list[str]) -> str:
        lowest, highest, first, inverse, *rest = options
        bin_of = f"""fma.rn.f32 t, X, {inverse}, 0f4B400000; mov.b32 a, t;
            sub.s32 a, {first}, a; min.u32 a, a, {BINS - 1};"""
        return for_those_inside(logits, [lowest, highest, *rest], bin_of)

    def in_arrays(self, x):
        bin_ = self.first - bits_of(x * self.inverse + ROUND)
        bin_ = jnp.where(bin_ >= BINS, BINS - 1, bin_)
        inside = (x >= self.lowest) & (x <= self.highest)
        many = units((x - self.top) * self.slope + self.fixed)
        return jnp.where(inside, bin_, BINS), many


class InOrder(NamedTuple):
    """Bins of so many floats each, from `high` down to `lowest`."""

    lowest: Any
    highest: Any
    high: Any  # as an ordered integer
    shift: Any
    top: Any
    slope: Any
    fixed: Any

    @staticmethod
    def assembly(logits: list[str], options: list[str]) -> str:
        lowest, highest, high, shift, *rest = options
        bin_of = f"""add.rn.f32 t, X, 0f00000000; mov.b32 a, t;
            shr.s32 n, a, 31; and.b32 n, n, 0x7FFFFFFF; xor.b32 a, a, n;
            sub.s32 a, {high}, a; shr.u32 a, a, {shift};"""
        return for_those_inside(logits, [lowest, highest, *rest], bin_of)

    def in_arrays(self, x):
        inside = (x >= self.lowest) & (x <= self.highest)
        bin_ = lax.shift_right_logical(self.high - ordered(x), self.shift)
        many = units((x - self.top) * self.slope + self.fixed)
        return jnp.where(inside, bin_, BINS), many


def add_to_bins(row: ClusterRow, x, kind: Even | Finer | InOrder) -> None:
    if row.interpret:
        bin_, many = kind.in_arrays(x)
        each = COPIES // WARPGROUPS
        here = jnp.where((bin_ >= 0) & (bin_ < BINS), bin_, BINS).reshape(-1)
        copy = lax.iota(jnp.int32, here.size) % each
        sums = jnp.zeros((BINS + 1, each), jnp.uint32)
        sums = sums.at[here, copy].add(many.reshape(-1).astype(jnp.uint32))
        row.bins[pl.ds(0, BINS), pl.ds(row.me * each, each)] += sums[:BINS]
        return

    def emit(_, x, ref, *options):
        copy = arith.remui(lane(), integer(COPIES))
        address = words_beyond(address_of(ref), copy)
        options = [o.registers.item() for o in options]
        for register in x.registers.flat:
            [size] = ir.VectorType(register.type).shape
            names = [f"${i}" for i in range(1, 1 + size + len(options))]
            text = kind.assembly(names[:size], names[size:])
            logits = [element(register, i) for i in range(size)]
            assembly(text, address, *logits, *options)

    splats = [plgpu.Layout.WG_SPLAT] * len(kind)
    inline: Any = plgpu.inline_mgpu(arg_types=(row.c.layout, plgpu.RefType(), *splats))
    inline(emit)(x, row.bins, *kind)
