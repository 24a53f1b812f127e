"""RMSNorm beside a second tensor of the same shape: a SiLU gate, or a plain factor.

    y = x / rms(x) * (weight + offset) * open(gate)           NORM_FIRST
    y = u / rms(u) * (weight + offset),  u = x * open(gate)   otherwise

with open(z) = z / (1 + exp(-z)) where SILU is set, else z. Forward moves 3 tensors,
backward 5 (reads x, gate and dy, writes dx and dgate).
"""

import jax

from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.faster_by_xla import slower_at_some_sizes
from jaxkern.triton.norm.gated_rms_norm_backward import gated_norm_bwd
from jaxkern.triton.norm.row_share import own_share, read_share, write_share
from jaxkern.triton.norm.row_tiles import (
    factor,
    forward_tile,
    per_row,
    read,
    read_and_keep,
    write,
)
from jaxkern.triton.norm.split_rows import (
    await_others,
    begin,
    split_rstd,
    split_sizes,
)

slower = slower_at_some_sizes("gated_rms_norm")


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


@jit
def split_gated_norm_fwd_kernel(
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
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    CLUSTER: tl.constexpr,
    EXCHANGE: tl.constexpr,
):
    """A row held by the programs of a cluster; all loads stand ahead of the sum."""
    memory = begin(CLUSTER, EXCHANGE)
    row, start, columns, at = own_share(D, BLOCK, CLUSTER, VECTOR)
    x = read_share(x_ptr, start, columns, at, NUM_ROWS, D, VECTOR)
    gate = read_share(gate_ptr, start, columns, at, NUM_ROWS, D, VECTOR)
    inside = (columns >= 0) & (columns < D)
    scale = factor(weight_ptr, columns, inside, OFFSET)
    gate = opened(gate, SILU)
    if not NORM_FIRST:
        x *= gate
    await_others(CLUSTER)
    rstd = split_rstd(x, memory, 0, D, EPS, CLUSTER)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * scale
    if NORM_FIRST:
        y *= gate
    write_share(y_ptr, start, columns, at, y, D, VECTOR)


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
    if sizes := split_sizes(x, several=True):
        kernel, programs = split_gated_norm_fwd_kernel, rows * sizes["CLUSTER"]
        sizes["D"] = d
    else:
        small = 1024 if 2048 < d < 4096 else None  # a chunk of 4096 is half empty
        kernel, sizes = gated_norm_fwd_kernel, forward_tile(rows, d, small)
        programs = -(-rows // sizes["ROWS"])
    return sparse_call(
        kernel,
        (programs,),
        {"x_ptr": x, "gate_ptr": gate, "weight_ptr": weight},
        {"y_ptr": like(x), "rstd_ptr": per_row(x)},
        sizes | {"EPS": eps, "OFFSET": offset, "SILU": silu, "NORM_FIRST": norm_first},
    )


def gated_rms_norm_fwd(x, gate, weight, *, eps, norm_before_gate):
    options = {"offset": 0.0, "silu": True, "norm_first": norm_before_gate}
    return gated_norm_fwd(x, gate, weight, eps=eps, **options)


def gated_rms_norm_bwd(x, gate, weight, rstd, dy, *, eps, norm_before_gate, wanted):
    del eps  # already in rstd
    options = {"offset": 0.0, "silu": True, "norm_first": norm_before_gate}
    return gated_norm_bwd(x, gate, weight, rstd, dy, **options, wanted=wanted)
