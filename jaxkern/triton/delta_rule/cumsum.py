"""Running sums of rows: one read, one write.

A program scans its rows a chunk at a time and carries the sum of what came before. The
scan of a chunk holds it in registers. An exclusive sum is the inclusive one of the
elements one place before, whose lines the caches hold.
"""

from typing import Any

from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere

CHUNK = 4096


def unsupported(x: Any = None, dy: Any = None, **rest: Any) -> str | None:
    """A reason in words, or None."""
    like = dy if x is None else x
    *_, n = like.shape
    rows = like.size // n if n else 0
    if n > CHUNK and rows < num_sms() // 4:
        return f"{rows} rows of {n} elements are too few programs for long sums"
    return unsupported_anywhere(x=like)


def tile_sizes(rows: int, n: int) -> dict:
    """About 16 elements a thread; several rows of one program where they are short."""
    block = min(next_power_of_2(n), CHUNK)
    together = max(1, min(2048 // block, next_power_of_2(rows)))
    warps = max(1, together * block // (16 * WARP))
    return {"BLOCK": block, "ROWS": together, "num_warps": warps}


@jit
def cumsum_kernel(
    x_ptr,
    y_ptr,
    NUM_ROWS: tl.constexpr,
    N: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    start = rows.to(tl.int64) * N
    present = rows < NUM_ROWS
    before = tl.zeros([ROWS, 1], tl.float32)
    chunks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    # a reversed sum runs over the chunks, and over each of them, from the end
    for k in range(chunks):
        first = (chunks - 1 - k if REVERSE else k) * BLOCK
        columns = first + tl.arange(0, BLOCK)[None, :]
        source = columns
        if EXCLUSIVE:
            source = columns + 1 if REVERSE else columns - 1
        inside = present & (source >= 0) & (source < N)
        x = tl.load(x_ptr + start + source, inside, 0.0).to(tl.float32)
        y = tl.cumsum(x, 1, reverse=REVERSE) + before
        if chunks > 1:
            last = first if REVERSE else first + BLOCK - 1
            before = tl.sum(tl.where(columns == last, y, 0.0), 1)[:, None]
        at = start + columns
        tl.store(y_ptr + at, y, present & (columns < N))


def cumsum_fwd(x, *, exclusive, reverse):
    *_, n = x.shape
    rows = x.size // n if n else 0
    sizes = tile_sizes(rows, n)
    constants = {
        "NUM_ROWS": rows,
        "N": n,
        "EXCLUSIVE": exclusive,
        "REVERSE": reverse,
    }
    grid = (-(-rows // sizes["ROWS"]),)
    given, results = {"x_ptr": x}, {"y_ptr": like(x)}
    return sparse_call(cumsum_kernel, grid, given, results, constants | sizes)[0]


def cumsum_bwd(dy, *, exclusive, reverse):
    return cumsum_fwd(dy, exclusive=exclusive, reverse=not reverse)
