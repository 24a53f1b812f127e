"""What the backward kernels on Hopper take of each query, and how dq leaves them.

By Triton's kernels where Triton is; in the interpreter, and where it is not, by XLA.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.gpu.attention import gradient_rows as triton
from jaxkern.gpu.attention.gradient_rows import FRACTION, HEAD_DIM, SMALLEST
from jaxkern.gpu.triton_call import missing
from jaxkern.pallas.attention.attention.gradient_blocks import BLOCK, CONSUMERS, dscale
from jaxkern.pallas.attention.attention.pairs import LOG2_E
from jaxkern.pallas.attention.attention.problem import Problem
from jaxkern.primitives.attention.attend import with_tail

HALF = HEAD_DIM // CONSUMERS  # columns of dq of a consumer
LINES = BLOCK * HALF // 256, 256  # 64 rows of them, as they are copied


def by_head(x: jax.Array, rows: int, fill: float) -> jax.Array:
    """[b t n] as [b n rows]."""
    short = rows - x.shape[1]
    x = jnp.moveaxis(x, 1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, short)], constant_values=fill)


def laid_out(lse, delta, rows: int):
    """(lse log2 e, delta), both [b n rows]; inf and 0 where a query sees nothing."""
    seen = lse != -jnp.inf  # what is not a number stays so
    lse2 = by_head(jnp.where(seen, lse * LOG2_E, jnp.inf), rows, math.inf)
    return lse2, by_head(jnp.where(seen, delta, 0.0), rows, 0.0)


def rows_by_xla(out, lse, dout, dlse, rows: int, tail=None):
    delta = jnp.sum(dout.astype(jnp.float32) * with_tail(out, tail), -1)
    # XLA would reduce inside of the transpose of by_head, 6 times slower.
    return laid_out(lse, lax.optimization_barrier(delta) - dlse, rows)


def rows_of(c: Problem, out, lse, tail, dout, dlse, interpret: bool):
    """(lse log2 e, delta), both [b n rows]."""
    rows = c.blocks * c.block_q
    if interpret or missing():
        return rows_by_xla(out, lse, dout, dlse, rows, tail)
    return triton.gradient_rows(out, lse, dout, dlse, rows, tail)


def sinks_gradient(sinks, lse2, delta):
    share = jnp.exp2(sinks.astype(jnp.float32)[:, None] * LOG2_E - lse2)
    return -jnp.sum(share * delta, (0, 2)).astype(sinks.dtype)


# dq counted in integers.


def dq_units(key, value, dout, delta):
    """In what each row of dq, [b n rows], is counted.

    |dq| <= sum |dS| max |k| <= (|dout| max |v| + |delta|) max |k|
    """
    group = dout.shape[2] // key.shape[2]

    def norm(x):
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), -1))

    def largest(x, axes):
        # not a number where some x is not finite, which a maximum may hide
        return jnp.max(x, axes) + 0.0 * jnp.sum(x, axes)

    def of_heads(x):
        return jnp.repeat(x, group, 1)[..., None]

    size = by_head(norm(dout), delta.shape[2], 0.0)
    slopes = size * of_heads(largest(norm(value), 1)) + jnp.abs(delta)
    widest = largest(jnp.abs(key.astype(jnp.float32)), (1, 3))
    return jnp.maximum(slopes * of_heads(widest), SMALLEST) * FRACTION


def counted_rows(
    c: Problem, key, value, out, lse, dout, dlse, interpret: bool, tail=None
):
    """(lse log2 e, delta, counts of 1, units, zeros of dq); units times the scale."""
    rows = c.blocks * c.block_q
    if interpret or missing():
        lse2, delta = rows_by_xla(out, lse, dout, dlse, rows, tail)
        units = dq_units(key, value, dout, delta)
        seen = lse2 != jnp.inf
        counts = jnp.where(seen, 1 / units, 0.0)
        units = jnp.where(seen, units * dscale(c), 0.0)
        zeros = jnp.zeros((*lse2.shape, HEAD_DIM), jnp.int32)
    else:
        lse2, delta, counts, units, zeros = triton.counted_rows(
            key, value, out, lse, dout, dlse, rows, dscale(c), tail
        )
    return lse2, delta, counts, units, zeros.reshape(c.b, c.n, -1, LINES[1])


def thread_order(x):
    """[64 64] in the order in which the threads of WGMMA hold it, as LINES."""
    x = x.reshape(4, 2, 8, 8, 4, 2)  # warp, half, row, 8 columns, 2 of them, column
    return x.transpose(3, 0, 2, 4, 1, 5).reshape(LINES)


def counted(dq, units, t: int, dtype, interpret: bool):
    """dq [b t n h] of integers in thread_order, not a number where units are none."""
    if not (interpret or missing()):
        return triton.counted(dq, units, t, dtype)
    b, n, rows = units.shape
    blocks = rows // BLOCK
    dq = dq.reshape(b, n, blocks, CONSUMERS, 8, 4, 8, 4, 2, 2)
    dq = dq.transpose(0, 2, 5, 8, 6, 1, 3, 4, 7, 9)
    dq = dq.reshape(b, rows, n, HEAD_DIM)[:, :t]
    return (dq * jnp.moveaxis(units, 1, 2)[:, :t, :, None]).astype(dtype)
