"""What the gradients of attention take beside their products.

Before: delta = rowsum(dout out) - dlse, of out with its tail, and log2 e lse, laid out
by head; where dq is counted in integers on Hopper, in units of 2^-30 of a bound of each
row, also these units and the zeros that are added to. After: integers as dq. All is
read and written once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.head_rows import load_rows, with_tail
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, tl, triton_call

BLOCK = 64  # rows of dq that are laid out together
HEAD_DIM = 128  # the only one at which dq is counted
PARTS = 128  # programs that share the keys of a head, at most
FRACTION = 2.0**-30  # the unit in which dq is counted is this part of its bound
SMALLEST = 1e-28  # the least bound: its FRACTION is no denormal
COUNTING = "widest_ptr", "longest_ptr", "counts_ptr", "units_ptr", "dq_ptr"


@jit
def size_bits(x):
    """|x| of float32 as integers of the same order, in which nan is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def largest_kernel(
    key_ptr,
    value_ptr,
    widest_ptr,
    longest_ptr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Bits of the largest |key| and of the largest norm of a value, of PARTS parts."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    widest = tl.zeros([ROWS], tl.int32)
    longest = tl.zeros([ROWS], tl.int32)
    for at_part in range(0, (S + PARTS * ROWS - 1) // (PARTS * ROWS)):
        row = (at_part * PARTS + part) * ROWS
        at = ((batch * S + row) * HEADS + head) * H
        k = load_rows(key_ptr + at, S - row, HEADS * H, H, ROWS, H, True)
        v = load_rows(value_ptr + at, S - row, HEADS * H, H, ROWS, H, True)
        k, v = k.to(tl.float32), v.to(tl.float32)
        widest = tl.maximum(widest, tl.max(size_bits(k), 1))
        longest = tl.maximum(longest, size_bits(tl.sqrt(tl.sum(v * v, 1))))
    at = (batch * HEADS + head) * PARTS + part
    tl.store(widest_ptr + at, tl.max(widest, 0))
    tl.store(longest_ptr + at, tl.max(longest, 0))


@jit
def largest_of(parts_ptr, PARTS: tl.constexpr):
    bits = tl.max(tl.load(parts_ptr + tl.arange(0, PARTS)), 0)
    return bits.to(tl.float32, bitcast=True)


@jit
def gradient_rows_kernel(
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    tail_ptr,
    widest_ptr,
    longest_ptr,
    lse2_ptr,
    delta_ptr,
    counts_ptr,
    units_ptr,
    dq_ptr,
    T: tl.constexpr,
    PADDED_T: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    HV: tl.constexpr,
    PADDED_HV: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    FRACTION: tl.constexpr,
    SMALLEST: tl.constexpr,
    DSCALE: tl.constexpr,
):
    """|dq| <= sum |dS| max |k| <= (|dout| max |v| + |delta|) max |k|"""
    n = tl.program_id(0)
    row = tl.program_id(1) * ROWS
    batch = tl.program_id(2).to(tl.int64)
    first = (batch * T + row) * N + n
    out = load_rows(out_ptr + first * HV, T - row, N * HV, HV, ROWS, PADDED_HV, True)
    dout = load_rows(dout_ptr + first * HV, T - row, N * HV, HV, ROWS, PADDED_HV, True)
    if tail_ptr is not None:
        at = tail_ptr + first * HV
        tail = load_rows(at, T - row, N * HV, HV, ROWS, PADDED_HV, True)
        out = with_tail(out, tail, out_ptr.dtype.element_ty)
    out, dout = out.to(tl.float32), dout.to(tl.float32)
    r = tl.arange(0, ROWS)
    inside = r < T - row
    lse = tl.load(lse_ptr + first + r * N, inside, -float("inf"))
    dlse = tl.load(dlse_ptr + first + r * N, inside, 0.0)
    seen = lse != -float("inf")  # what is not a number stays so
    delta = tl.where(seen, tl.sum(out * dout, 1) - dlse, 0.0)
    by_head = (batch * N + n) * PADDED_T + row
    tl.store(delta_ptr + by_head + r, delta)
    lse2 = tl.where(seen, lse * 1.4426950408889634, float("inf"))
    tl.store(lse2_ptr + by_head + r, lse2)
    if dq_ptr is not None:
        parts = (batch * (N // GROUP) + n // GROUP) * PARTS
        longest = largest_of(longest_ptr + parts, PARTS)
        widest = largest_of(widest_ptr + parts, PARTS)
        bound = tl.sqrt(tl.sum(dout * dout, 1)) * longest + tl.abs(delta)
        bound *= widest
        bound += bound - bound  # not a number where it is infinite
        bound = tl.maximum(bound, SMALLEST, tl.PropagateNan.ALL)
        unit = bound * FRACTION
        tl.store(counts_ptr + by_head + r, tl.where(seen, 1.0 / unit, 0.0))
        tl.store(units_ptr + by_head + r, tl.where(seen, unit * DSCALE, 0.0))
        at = by_head * HV + r[:, None] * HV + tl.arange(0, HV)[None, :]
        tl.store(dq_ptr + at, tl.zeros([ROWS, HV], tl.int32))


@jit
def counted_kernel(
    counted_ptr,
    units_ptr,
    dq_ptr,
    T: tl.constexpr,
    PADDED_T: tl.constexpr,
    N: tl.constexpr,
):
    """dq of 64 rows, in the order in which the threads of WGMMA hold them."""
    n = tl.program_id(0)
    row = tl.program_id(1) * 64
    batch = tl.program_id(2).to(tl.int64)
    by_head = (batch * N + n) * PADDED_T + row
    x = tl.load(counted_ptr + by_head * 128 + tl.arange(0, 64 * 128))
    # half of the columns, 8 columns, warp, row, 2 columns, 8 rows, column
    x = tl.reshape(x, [2, 8, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [2, 5, 3, 0, 1, 4, 6]), [64, 128])
    r = tl.arange(0, 64)
    unit = tl.load(units_ptr + by_head + r)
    y = x.to(tl.float32) * unit[:, None]
    at = ((batch * T + row + r[:, None]) * N + n) * 128 + tl.arange(0, 128)[None, :]
    tl.store(dq_ptr + at, y, r[:, None] < T - row)


def gradient_rows(out, lse, dout, dlse, padded: int, tail=None):
    """(log2 e lse, delta), both [b n padded]."""
    b, t, n, hv = out.shape
    by_head = jax.ShapeDtypeStruct((b, n, padded), jnp.float32)
    rows = BLOCK if hv <= HEAD_DIM else BLOCK // 2
    absent: Any = dict.fromkeys(COUNTING)
    operands, without = given(out, lse, dout, dlse, tail)
    return triton_call(
        gradient_rows_kernel,
        *operands,
        out=[by_head, by_head],
        grid=(n, padded // rows, b),
        **absent,
        **without,
        T=t,
        PADDED_T=padded,
        N=n,
        GROUP=1,
        HV=hv,
        PADDED_HV=next_power_of_2(hv),
        ROWS=rows,
        PARTS=1,
        FRACTION=FRACTION,
        SMALLEST=SMALLEST,
        DSCALE=1.0,
    )


def given(out, lse, dout, dlse, tail) -> tuple[tuple, dict[str, Any]]:
    """(operands, those that are absent); a tail of no numbers is."""
    operands = out, lse, dout, dlse
    if tail is None or not tail.shape[-1]:
        return operands, {"tail_ptr": None}
    return (*operands, tail), {}


def counted_rows(
    key, value, out, lse, dout, dlse, padded: int, dscale: float, tail=None
):
    """(log2 e lse, delta, counts, units times dscale, zeros)."""
    b, t, n, hv = out.shape
    _, s, heads, h = key.shape
    parts = min(PARTS, next_power_of_2(-(-s // BLOCK)))  # each has rows
    part = jax.ShapeDtypeStruct((b, heads, parts), jnp.int32)
    widest, longest = triton_call(
        largest_kernel,
        key,
        value,
        out=[part, part],
        grid=(heads, parts, b),
        num_warps=8,
        S=s,
        HEADS=heads,
        H=h,
        ROWS=BLOCK,
        PARTS=parts,
    )
    by_head = jax.ShapeDtypeStruct((b, n, padded), jnp.float32)
    operands, without = given(out, lse, dout, dlse, tail)
    return triton_call(
        gradient_rows_kernel,
        *operands,
        widest,
        longest,
        out=[by_head] * 4 + [jax.ShapeDtypeStruct((b, n, padded, hv), jnp.int32)],
        grid=(n, padded // BLOCK, b),
        **without,
        T=t,
        PADDED_T=padded,
        N=n,
        GROUP=n // heads,
        HV=hv,
        PADDED_HV=hv,
        ROWS=BLOCK,
        PARTS=parts,
        FRACTION=FRACTION,
        SMALLEST=SMALLEST,
        DSCALE=dscale,
    )


def counted(dq, units, t: int, dtype):
    """Integers [b n ...] and their units [b n padded] as [b t n h]."""
    b, n, padded = units.shape
    (result,) = triton_call(
        counted_kernel,
        dq,
        units,
        out=[jax.ShapeDtypeStruct((b, t, n, HEAD_DIM), dtype)],
        grid=(n, -(-t // BLOCK), b),
        T=t,
        PADDED_T=padded,
        N=n,
    )
    return result
