"""RMSNorm beside a second tensor of the same shape: a SiLU gate, or a plain factor.

    y = x / rms(x) * (weight + offset) * open(gate)           NORM_FIRST
    y = u / rms(u) * (weight + offset),  u = x * open(gate)   otherwise

with open(z) = z / (1 + exp(-z)) where SILU is set, else z. Forward moves 3 tensors,
backward 5 (reads x, gate and dy, writes dx and dgate).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.triton import triton_call
from jaxkern.triton.block_sizes import next_power_of_2
from jaxkern.triton.norm.row_tiles import (
    backward_tile,
    factor,
    forward_tile,
    num_rows,
    per_row,
    read,
    read_and_keep,
    summed,
    write,
)
from jaxkern.triton.triton_call import jit, like, sparse_call, tl

LONGEST = 8192  # columns of a row that stays in registers, backward


def unsupported(*, x, rstd=None, **named) -> str | None:
    if rstd is not None and x.shape[-1] > LONGEST:
        return f"a row has {x.shape[-1]} columns, more than {LONGEST}"
    return triton_call.unsupported(x=x, **named)


def slower(*, x: Any, dy: Any = None, **_: Any) -> str | None:
    d = x.shape[-1]
    block = next_power_of_2(d)
    if dy is not None and d > 4096 and 3 * d < 2 * block:
        return f"a row of {d} columns leaves a third of a block of {block} idle"
    return None


@jit
def opened(z, SILU: tl.constexpr):
    if SILU:
        return z / (1.0 + tl.exp(-z))
    else:
        return z


@jit
def gated_norm_fwd_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    present = rows < NUM_ROWS
    start = rows.to(tl.int64) * D
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        mask = present & (columns < D)
        u = read_and_keep(x_ptr, start + columns, mask)
        if not NORM_FIRST:
            u *= opened(read_and_keep(gate_ptr, start + columns, mask), SILU)
        squares += u * u
    rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / D + EPS)
    tl.store(rstd_ptr + rows, rstd, present)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        mask = present & (columns < D)
        y = read(x_ptr, start + columns, mask) * rstd
        y *= opened(read(gate_ptr, start + columns, mask), SILU)
        y *= factor(weight_ptr, columns, columns < D, OFFSET)
        write(y_ptr, start + columns, y, mask)


def gated_norm_fwd(
    x: jax.Array,
    gate: jax.Array,
    weight: jax.Array | None,
    *,
    eps: float,
    offset: float,
    silu: bool,
    norm_first: bool,
) -> tuple[jax.Array | None, ...]:
    rows = num_rows(x)
    d = x.shape[-1]
    small = 2048 < d < 4096  # there a chunk of 4096 is half empty
    sizes = forward_tile("gated_norm_fwd", rows, d, x.dtype, small)
    return sparse_call(
        gated_norm_fwd_kernel,
        (-(-rows // sizes["ROWS"]),),
        {"x_ptr": x, "gate_ptr": gate, "weight_ptr": weight},
        {"y_ptr": like(x), "rstd_ptr": per_row(x)},
        sizes | {"EPS": eps, "OFFSET": offset, "SILU": silu, "NORM_FIRST": norm_first},
    )


@jit
def gated_norm_bwd_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dgate_ptr,
    dweight_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(tl.program_id(0), num_blocks, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        present = rows < NUM_ROWS
        mask = present & inside
        at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
        x = read(x_ptr, at, mask)
        z = read(gate_ptr, at, mask)
        dy = read(dy_ptr, at, mask)
        rstd = tl.load(rstd_ptr + rows, present, 0.0)
        gate = z
        if SILU:
            s = 1.0 / (1.0 + tl.exp(-z))
            gate = z * s
            slope = s * (1.0 + z * (1.0 - s))
        if NORM_FIRST:
            xhat = x * rstd
            dnormed = dy * gate
        else:
            xhat = x * gate * rstd
            dnormed = dy
        # read each time: held over the loop it would cost registers
        scale = factor(weight_ptr, columns, inside, OFFSET)
        dxhat = dnormed * scale
        du = dxhat - xhat * (tl.sum(dxhat * xhat, 1, keep_dims=True) / D)
        du *= rstd
        if dweight_ptr is not None:
            dweight += dnormed * xhat
        if NORM_FIRST:
            write(dx_ptr, at, du, mask)
            dgate = dy * xhat * scale
        else:
            write(dx_ptr, at, du * gate, mask)
            dgate = du * x
        if SILU:
            dgate *= slope
        write(dgate_ptr, at, dgate, mask)
    if dweight_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * D + columns
        tl.store(dweight_ptr + at, tl.sum(dweight, 0, keep_dims=True), inside)


def gated_norm_bwd(
    x: jax.Array,
    gate: jax.Array,
    weight: jax.Array | None,
    rstd: jax.Array,
    dy: jax.Array,
    *,
    offset: float,
    silu: bool,
    norm_first: bool,
    wanted: tuple[bool, bool, bool],
) -> tuple[jax.Array | None, ...]:
    d = x.shape[-1]
    stages = 3 if d <= LONGEST // 2 else 2
    sizes = backward_tile("gated_norm_bwd", x, 4, LONGEST, stages)
    partial = jax.ShapeDtypeStruct((sizes["PROGRAMS"], d), jnp.float32)
    results = [like(x), like(gate), None if weight is None else partial]
    names = ("dx_ptr", "dgate_ptr", "dweight_ptr")
    dx, dgate, dweight = sparse_call(
        gated_norm_bwd_kernel,
        (sizes["PROGRAMS"],),
        {
            "x_ptr": x,
            "gate_ptr": gate,
            "weight_ptr": weight,
            "rstd_ptr": rstd,
            "dy_ptr": dy,
        },
        {n: r if w else None for n, r, w in zip(names, results, wanted, strict=True)},
        sizes | {"OFFSET": offset, "SILU": silu, "NORM_FIRST": norm_first},
    )
    return dx, dgate, summed(dweight, weight)


def gated_rms_norm_fwd(x, gate, weight, *, eps, norm_before_gate):
    options = {"offset": 0.0, "silu": True, "norm_first": norm_before_gate}
    return gated_norm_fwd(x, gate, weight, eps=eps, **options)


def gated_rms_norm_bwd(x, gate, weight, rstd, dy, *, eps, norm_before_gate, wanted):
    del eps  # already in rstd
    options = {"offset": 0.0, "silu": True, "norm_first": norm_before_gate}
    return gated_norm_bwd(x, gate, weight, rstd, dy, **options, wanted=wanted)


def rms_norm_mul_fwd(x, scale, weight, *, eps, offset):
    options = {"offset": offset, "silu": False, "norm_first": True}
    return gated_norm_fwd(x, scale, weight, eps=eps, **options)


def rms_norm_mul_bwd(x, scale, weight, rstd, dy, *, eps, offset, wanted):
    del eps  # already in rstd
    options = {"offset": offset, "silu": False, "norm_first": True}
    return gated_norm_bwd(x, scale, weight, rstd, dy, **options, wanted=wanted)
