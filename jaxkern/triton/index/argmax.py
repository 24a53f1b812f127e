"""Index of the largest element: a row, or each chunk of a long one, in registers.

A long row is divided so that many programs read it; a second launch takes the best of
the chunks. Every element is read once. One row takes as long as by XLA, but may join
the launches of a chain.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl, triton_call
from jaxkern.triton.index.threshold import ordered_bits

CHUNK = 4096  # elements of one program
LONGEST = 2**24  # the chunks of a row are the elements of one program


def unsupported(*, x: Any, **named: Any) -> str | None:
    if x.shape and x.shape[-1] > LONGEST:
        return f"a row of `x` has {x.shape[-1]} elements, above {LONGEST}"
    return bridge.unsupported(x=x, **named)


@jit
def argmax_kernel(
    x_ptr,
    key_ptr,
    index_ptr,
    NUM_ROWS: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    NAN_WINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Of each part of each row: the largest element as an integer, its index."""
    if AHEAD:
        begin_behind_those_ahead()
    part = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row = part // PARTS
    column = part % PARTS * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < NUM_ROWS) & (column < V)
    at = row.to(tl.int64) * V + column
    x = tl.load(x_ptr + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    key = ordered_bits(x)
    if not NAN_WINS:
        key = tl.where(x == x, key, -0x80000000)
    key = tl.where(inside, key, -0x80000000)
    best = tl.max(key, 1, keep_dims=True)
    # a row of NaN that never wins ties with what is outside: the smallest index wins
    index = tl.min(tl.where(key == best, column, 0x7FFFFFFF), 1, keep_dims=True)
    present = row < NUM_ROWS
    if key_ptr is not None:
        tl.store(key_ptr + part, best, present)
    tl.store(index_ptr + part, index, present)


@jit
def best_part_kernel(
    key_ptr,
    part_index_ptr,
    index_ptr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The best of a row's parts, the first of equal ones."""
    if AHEAD:
        begin_behind_those_ahead()
    row = tl.program_id(0)
    part = tl.arange(0, N)
    at = row.to(tl.int64) * PARTS + part
    key = tl.load(key_ptr + at, part < PARTS, -0x80000000)
    index = tl.load(part_index_ptr + at, part < PARTS, 0x7FFFFFFF)
    best = tl.max(key, 0)
    tl.store(index_ptr + row, tl.min(tl.where(key == best, index, 0x7FFFFFFF), 0))


def argmax(x: jax.Array, *, nan_policy: str) -> jax.Array:
    *lead, v = x.shape
    rows = x.size // v
    if rows == 0:
        return jnp.zeros(lead, jnp.int32)
    block = min(next_power_of_2(v), CHUNK)
    parts = -(-v // block)
    together = max(1, min(2048 // block, next_power_of_2(rows)))
    rule = {"num_warps": max(1, min(8, together * block // 512))}
    sizes = {"ROWS": together, "BLOCK": block} | rule
    one = jax.ShapeDtypeStruct((rows, parts), jnp.int32)
    found: tuple[Any, ...] = sparse_call(
        argmax_kernel,
        (-(-rows * parts // together),),
        {"x_ptr": x},
        {"key_ptr": one if parts > 1 else None, "index_ptr": one},
        {"NUM_ROWS": rows, "V": v, "PARTS": parts}
        | {"NAN_WINS": nan_policy == "propagate"}
        | sizes,
    )
    key, index = found
    if parts > 1:
        [index] = triton_call(
            best_part_kernel,
            key,
            index,
            out=[jax.ShapeDtypeStruct((rows,), jnp.int32)],
            grid=(rows,),
            num_warps=1,
            PARTS=parts,
            N=next_power_of_2(parts),
        )
    return index.reshape(lead)
