"""Backward kernels of the norms over rows: which of them, and that of short rows.

Programs walk over many rows, so that the gradients of weight and bias cost one partial
sum a program. The rows of `row_norm_forward`, with the same names.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2, num_programs
from jaxkern.gpu.triton_call import jit, like, max_shared_bytes, sparse_call, tl
from jaxkern.triton.norm.long_row_norm_backward import (
    CHUNKED,
    backward_chunks,
    chunked_row_norm_bwd_kernel,
    long_row_norm_bwd,
)
from jaxkern.triton.norm.row_tiles import partial_sums, summed
from jaxkern.triton.norm.split_rows import (
    alone,
    await_others,
    begin,
    heard,
    over_cluster,
    own_columns,
    split_walk,
    tell,
)
from jaxkern.triton.norm.streamed_rows import stream_sizes, streamed_row_norm_bwd

LONGEST = 8192  # a row up to here stays in registers, beside its share of dweight


def backward_tile(rows: int, d: int, dtype, num_streams: int) -> dict:
    """Two more tiles load while one is worked on, where they fit in shared memory."""
    block = next_power_of_2(d)
    # (elements of a tile, warps, programs of a multiprocessor), as measured on an H200
    elements, warps, waves = (
        (8192, 8, 1)
        if d <= 256
        else (2048, 4, 3)
        if d <= 1024
        else (4096, 8, 2)
        if d <= 2048
        else (LONGEST, 16, 1)
    )
    together = max(1, min(elements // block, next_power_of_2(rows)))
    tile_bytes = together * block * jnp.dtype(dtype).itemsize * num_streams
    return {
        "BLOCK": block,
        "ROWS": together,
        "WAVES": waves,
        "STAGES": 3 if 3.2 * tile_bytes <= max_shared_bytes() else 1,
        "num_warps": min(warps, max(1, together * block // 256)),
    }


@jit
def row_norm_bwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dtotal_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dbias_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    COUNT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EXCHANGE: tl.constexpr,
):
    memory = begin(CLUSTER, EXCHANGE)
    lanes = own_columns(BLOCK, CLUSTER)
    columns = lanes[None, :]
    inside = columns < D
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32) + OFFSET
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    await_others(CLUSTER)
    first = tl.program_id(0) // CLUSTER
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(first, num_blocks, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
        present = rows < NUM_ROWS
        mask = present & inside
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_first")
        dy = dy.to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, present, 0.0)
        if mean_ptr is not None:
            u = tl.where(inside, u - tl.load(mean_ptr + rows, present, 0.0), 0.0)
        xhat = u * rstd
        dxhat = dy
        if weight_ptr is not None:
            dxhat = dy * scale
        place = 2 * (block // PROGRAMS % 2)
        if CLUSTER > 1 and mean_ptr is not None:
            tell(tl.sum(dxhat), memory, place + 1, CLUSTER)
        products = tl.sum(dxhat * xhat, 1, keep_dims=True)
        if CLUSTER > 1:
            products = over_cluster(tl.sum(products), memory, place, CLUSTER)
        du = dxhat - xhat * (products / COUNT)
        if mean_ptr is not None:
            if CLUSTER > 1:
                du -= tl.sum(heard(memory, place + 1, CLUSTER), 0) / D
            else:
                du -= tl.sum(dxhat, 1, keep_dims=True) / D
        du = du * rstd
        if dtotal_ptr is not None:
            du += tl.load(dtotal_ptr + at, mask, 0.0).to(tl.float32)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, du, mask, eviction_policy="evict_first")
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + at, du, mask, eviction_policy="evict_first")
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
    partial = first.to(tl.int64) * D + lanes
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), lanes < D)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), lanes < D)


def row_norm_bwd(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    rstd: jax.Array,
    dy: jax.Array,
    residual: jax.Array | None = None,
    mean: jax.Array | None = None,
    dtotal: jax.Array | None = None,
    offset: float = 0.0,
    wanted: Sequence[bool] = (True, False, False, False),
    mean_square: bool = True,
) -> tuple[jax.Array | None, ...]:
    """Gradients of (x, residual, weight, bias); None where absent or not wanted."""
    *_, d = x.shape
    rows = x.size // d if d else 0
    operands = (x, residual, weight, bias)
    targets = [o if w else None for o, w in zip(operands, wanted, strict=True)]
    given = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "dy_ptr": dy,
        "dtotal_ptr": dtotal,
    }
    constants = {"D": d, "OFFSET": offset, "COUNT": d if mean_square else 1}

    def results(parts: int) -> dict:
        return {
            "dx_ptr": like(targets[0]),
            "dresidual_ptr": like(targets[1]),
            "dweight_ptr": partial_sums(parts, d, targets[2]),
            "dbias_ptr": partial_sums(parts, d, targets[3]),
        }

    plain = all(o is None for o in (residual, mean, dtotal, targets[3]))
    if split := split_walk(x, centred=mean is not None):
        programs = split["PROGRAMS"]
        out = sparse_call(
            row_norm_bwd_kernel,
            (programs * split["CLUSTER"],),
            given,
            results(programs),
            constants | split,
        )
    elif plain and (streamed := stream_sizes(x, weight)):
        dx, dweight = streamed_row_norm_bwd(given, results, constants | streamed)
        out = dx, None, dweight, None
    elif d > CHUNKED:
        out = long_row_norm_bwd(given, results, constants, rows, d)
    else:
        kernel = row_norm_bwd_kernel if d <= LONGEST else chunked_row_norm_bwd_kernel
        if d <= LONGEST:
            streams = 2 + (residual is not None) + (dtotal is not None)
            sizes = backward_tile(rows, d, x.dtype, streams) | alone()
        else:
            sizes = backward_chunks(d)
        blocks = -(-rows // sizes.get("ROWS", 1))
        programs = num_programs(blocks, sizes.pop("WAVES"))
        sizes |= {"NUM_ROWS": rows, "PROGRAMS": programs}
        out = sparse_call(
            kernel, (programs,), given, results(programs), constants | sizes
        )
    dx, dresidual, *partial = out
    return dx, dresidual, *map(summed, partial, (weight, bias))
