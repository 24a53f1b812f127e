"""Softmax of rows that only a cluster of multiprocessors holds, on Hopper.

    y = exp(scale x - m) / sum(exp(scale x - m)),   dx = scale y (dy - sum(y dy))

Maximum and sum are kept for each place of a piece, raised once for all pieces of a
chunk (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), then joined.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.pallas.rows.clusters import Walk, walk_rows
from jaxkern.pallas.rows.plan import few_rows, plan, refusal

LOG2E = math.log2(math.e)
STREAMED = 65536  # elements of a row: up to them Triton's kernels are as fast


def unsupported(
    x: Any = None, mask: Any = None, y: Any = None, dy: Any = None, *, scale: float
) -> str | None:
    """A reason in words, or None; of the forward pass and of the backward pass."""
    if mask is not None:
        return "only rows without a mask have it"
    if scale == 0:
        return "`scale` is 0"
    return refusal(x) if y is None else refusal(y, dy)


def slower(x: Any = None, y: Any = None, **_: Any) -> str | None:
    d = (x if y is None else y).shape[-1]
    if d <= STREAMED:
        return f"a row of {d} elements stays in the caches"
    return few_rows(x if y is None else y)


def running_sums(walk: Walk, scale2: float, sign: float = 1.0) -> tuple[Any, Callable]:
    """`init` and `add` of the maximum and the sum of exp2 below it, by place."""

    def add(slot, masked, carry):
        peak, total = carry
        z = [walk.read(0, slot, k, sign) for k in range(walk.c.pieces)]
        if masked:
            lowest = walk.splat(-jnp.inf)
            z = [jnp.where(walk.inside(k), x, lowest) for k, x in enumerate(z)]
        higher = peak
        for x in z:
            higher = jnp.maximum(higher, x)
        base = base_of(higher) * scale2
        total = total * jnp.exp2(peak * scale2 - base)
        for x in z:
            total = total + jnp.exp2(x * scale2 - base)
        return higher, total

    return (walk.splat(-jnp.inf), walk.splat(0.0)), add


def base_of(top):
    """What exponents are relative to: always finite, but for NaN."""
    return jnp.where(jnp.abs(top) == jnp.inf, 0.0, top)


def row_sums(walk, i, carry, scale2: float):
    """(maximum times scale2, sum of exp2 below it) of row i, over the whole cluster."""
    peak, total = carry
    top = jnp.max(peak, axis=1)
    base = base_of(top) * scale2
    total = jnp.sum(total * jnp.exp2(peak * scale2 - walk.per_line(base)), axis=1)
    tops, totals = walk.exchange(i, top, total)
    top = jnp.max(tops, axis=0)
    base = base_of(top)
    total = jnp.sum(totals * jnp.exp2((tops - base) * scale2), axis=0)
    return base * scale2, total


def softmax_fwd(
    x: jax.Array,
    mask: None,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    del mask  # absent
    d = x.shape[-1]
    c = plan(x.size // d, d, x.dtype.itemsize)
    assert c is not None  # as `unsupported` found
    sign, scale2 = math.copysign(1.0, scale), abs(scale) * LOG2E

    def consume(walk, *_):
        def total(i, carry):
            base, total = row_sums(walk, i, carry, scale2)
            factor = 1.0 / jnp.where(total == 0.0, 1.0, total)
            return base, jnp.where(total == jnp.inf, jnp.nan, factor)

        def write(slot, j, sums):
            base, factor = sums
            for k in range(c.pieces):
                z = walk.read(0, slot, k, sign)
                walk.write(slot, k, jnp.exp2(z * scale2 - base) * factor)

        walk.rows_of(*running_sums(walk, scale2, sign), total, write)

    [y] = walk_rows(c, (x,), (), 2, consume, interpret, "softmax")
    return y


def softmax_bwd(
    y: jax.Array, dy: jax.Array, *, scale: float, interpret: bool = False
) -> jax.Array:
    d = y.shape[-1]
    c = plan(y.size // d, d, 2 * y.dtype.itemsize)
    assert c is not None  # as `unsupported` found

    def consume(walk, *_):
        def add(slot, masked, carry):
            for k in range(c.pieces):
                product = walk.read(0, slot, k) * walk.read(1, slot, k)
                if masked:
                    product = jnp.where(walk.inside(k), product, walk.splat(0.0))
                carry = carry + product
            return carry

        def total(i, products):
            [products] = walk.exchange(i, jnp.sum(products, axis=1))
            return jnp.sum(products, axis=0)

        def write(slot, j, mean):
            for k in range(c.pieces):
                y, dy = walk.read(0, slot, k), walk.read(1, slot, k)
                walk.write(slot, k, scale * y * (dy - mean))

        walk.rows_of(walk.splat(0.0), add, total, write)

    [dx] = walk_rows(c, (y, dy), (), 1, consume, interpret, "softmax_bwd")
    return dx
