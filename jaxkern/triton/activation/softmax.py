"""Softmax over rows, scaled, capped and masked; a row that keeps nothing gives zeros.

A row up to NARROW elements stays in registers. A longer one is read twice, the second
time mostly from the caches: once for its running maximum and sum, once to write.
"""

from typing import Any

from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.activation.softcap import scaled_logits, softcap_slope
from jaxkern.triton.activation.streamed_softmax import (
    stream_sizes,
    streamed_softmax_fwd,
)

NARROW = 32768  # elements of a row that stay in registers, forward
NARROW_BACKWARD = 2048


def slower(x: Any = None, y: Any = None, **_: Any) -> str | None:
    rows, d = num_rows(x if y is None else y), (x if y is None else y).shape[-1]
    if d >= 65536 and 4 * rows < num_sms():
        return f"{rows} rows of {d} elements leave most of the GPU idle"
    return None


def row_tile(rows: int, d: int) -> dict:
    """About 16 elements a thread, 32 in the longest rows."""
    block = next_power_of_2(d)
    together = max(1, min(2048 // block, next_power_of_2(rows)))
    warps = min(max(together * block // (16 * WARP), 1), 16 if d <= 16384 else 32)
    return {"BLOCK": block, "ROWS": together, "num_warps": warps}


def row_chunks(d: int) -> dict:
    """Beyond 16384 few rows at a time: the caches hold a row until it is reread."""
    block = 4096 if d <= 16384 else 16384
    warps = 8 if d <= 8192 else block // 512 if block > 4096 else 16
    return {"BLOCK": block, "num_warps": warps}


@jit
def softmax_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
    inside = (rows < NUM_ROWS) & (columns < D)
    x = tl.load(x_ptr + at, inside, 0.0, eviction_policy="evict_first")
    kept = inside
    if mask_ptr is not None:
        kept = inside & tl.load(mask_ptr + at, inside, 0).to(tl.int1)
    z = tl.where(kept, scaled_logits(x, SCALE, SOFTCAP), -float("inf"))
    top = tl.max(z, 1, keep_dims=True)
    weight = tl.exp(z - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 1, keep_dims=True)
    y = weight / tl.where(total == 0.0, 1.0, total)
    tl.store(y_ptr + at, y, inside, eviction_policy="evict_first")


@jit
def long_softmax_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    # each lane keeps the running maximum and sum of its own columns
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        inside = first + columns < D
        at = start + first + columns
        z = tl.load(x_ptr + at, inside, -float("inf"), eviction_policy="evict_last")
        z = tl.where(inside, scaled_logits(z, SCALE, SOFTCAP), -float("inf"))
        if mask_ptr is not None:
            z = tl.where(tl.load(mask_ptr + at, inside, 0) != 0, z, -float("inf"))
        higher = tl.maximum(top, z)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(z - base)
        top = higher
    peak = tl.max(top, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(total * tl.exp(top - peak), 0)
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    for first in range(0, D, BLOCK):
        inside = first + columns < D
        at = start + first + columns
        z = tl.load(x_ptr + at, inside, -float("inf"), eviction_policy="evict_first")
        z = scaled_logits(z, SCALE, SOFTCAP)
        if mask_ptr is not None:
            z = tl.where(tl.load(mask_ptr + at, inside, 0) != 0, z, -float("inf"))
        y = tl.exp(z - peak) * factor
        tl.store(y_ptr + at, y, inside, eviction_policy="evict_first")


def softmax_fwd(x, mask, *, scale, softcap=None):
    *_, d = x.shape
    if mask is None and softcap is None and (streamed := stream_sizes(x)):
        return streamed_softmax_fwd(x, SCALE=scale, **streamed)
    rows = x.size // d if d else 0
    given = {"x_ptr": x, "mask_ptr": mask}
    results = {"y_ptr": like(x)}
    constants = {"D": d, "SCALE": scale, "SOFTCAP": softcap}
    if d <= NARROW:
        sizes = row_tile(rows, d) | {"NUM_ROWS": rows}
        grid = (-(-rows // sizes["ROWS"]),)
        return sparse_call(softmax_kernel, grid, given, results, constants | sizes)[0]
    sizes = row_chunks(d)
    return sparse_call(long_softmax_kernel, (rows,), given, results, constants | sizes)[
        0
    ]


softcap_softmax_fwd = softmax_fwd


@jit
def gradient(x_ptr, y, dy, mean, at, inside, SCALE, SOFTCAP: tl.constexpr):
    dx = SCALE * y * (dy - mean)
    if x_ptr is not None:
        x = tl.load(x_ptr + at, inside, 0.0, eviction_policy="evict_first")
        # what is hidden may be NaN
        dx *= softcap_slope(tl.where(y == 0.0, 0.0, x.to(tl.float32) * SCALE), SOFTCAP)
    return dx


@jit
def softmax_bwd_kernel(
    x_ptr,
    y_ptr,
    dy_ptr,
    dx_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
    inside = (rows < NUM_ROWS) & (columns < D)
    y = tl.load(y_ptr + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    dy = tl.load(dy_ptr + at, inside, 0.0, eviction_policy="evict_first")
    dy = dy.to(tl.float32)
    mean = tl.sum(y * dy, 1, keep_dims=True)
    dx = gradient(x_ptr, y, dy, mean, at, inside, SCALE, SOFTCAP)
    tl.store(dx_ptr + at, dx, inside)


@jit
def long_softmax_bwd_kernel(
    x_ptr,
    y_ptr,
    dy_ptr,
    dx_ptr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        inside = first + columns < D
        at = start + first + columns
        y = tl.load(y_ptr + at, inside, 0.0, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + at, inside, 0.0, eviction_policy="evict_last")
        products += y.to(tl.float32) * dy.to(tl.float32)
    mean = tl.sum(products, 0)
    for first in range(0, D, BLOCK):
        inside = first + columns < D
        at = start + first + columns
        y = tl.load(y_ptr + at, inside, 0.0, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + at, inside, 0.0, eviction_policy="evict_first")
        y, dy = y.to(tl.float32), dy.to(tl.float32)
        dx = gradient(x_ptr, y, dy, mean, at, inside, SCALE, SOFTCAP)
        tl.store(dx_ptr + at, dx, inside, eviction_policy="evict_first")


def softmax_bwd(y, dy, *, scale):
    return softcap_softmax_bwd(None, y, dy, scale=scale, softcap=None)


def softcap_softmax_bwd(x, y, dy, *, scale, softcap):
    *_, d = y.shape
    rows = y.size // d if d else 0
    given = {"x_ptr": x, "y_ptr": y, "dy_ptr": dy}
    results = {"dx_ptr": like(y)}
    constants = {"D": d, "SCALE": scale, "SOFTCAP": softcap}
    if d <= NARROW_BACKWARD:
        sizes = row_tile(rows, d) | {"NUM_ROWS": rows}
        grid = (-(-rows // sizes["ROWS"]),)
        return sparse_call(softmax_bwd_kernel, grid, given, results, constants | sizes)[
            0
        ]
    sizes = row_chunks(d)
    return sparse_call(
        long_softmax_bwd_kernel, (rows,), given, results, constants | sizes
    )[0]
