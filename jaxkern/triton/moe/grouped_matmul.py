"""Grouped products by Triton, from sm_80 on: one program a tile of one group.

`row_tiles` lists the tiles on the device; of the grid, which has room for the most that
there can be, the programs behind the last tile return at once. Where groups have few
rows tiles are low: then reading the weights decides. Nothing is added in an order that
changes between runs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.moe.row_tiles import group_rows, most_tiles, row_tiles
from jaxkern.triton.moe.rows_kernel import rows_kernel
from jaxkern.triton.moe.weights_kernel import weights_kernel

LOWEST = 16  # rows of a tile that the tensor cores take
BESIDE = 8  # tiles of one row block that are computed beside each other


def unsupported(x: Any, w: Any, dy: Any = None, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if rest.get("preferred_element_type") is not None:
        return "`preferred_element_type`: the kernels round to the dtype of x"
    named = {"x": x, "w": w} | ({} if dy is None else {"dy": dy})
    if reason := bridge.unsupported(**named):
        return reason
    if not x.size * w.size:
        return "an operand is empty"
    if len({a.dtype for a in named.values()}) > 1:
        return f"{', '.join(f'`{n}` is {a.dtype.name}' for n, a in named.items())}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`x` is {x.dtype.name}"
    return None


def rows_of_tile(r: int, e: int) -> int:
    """At most the mean group, rounded up; 128."""
    return min(128, max(LOWEST, next_power_of_2(-(-r // e))))


def sizes(block_m: int, n: int, k: int) -> dict[str, Any]:
    """Of a tile of `block_m` rows: columns, depth, warps and stages."""
    low = block_m <= 32
    block_n = min(64 if low else 256, max(16, next_power_of_2(n)))
    block_k = min(128 if low else 64, max(16, next_power_of_2(k)))
    stages = 4 if low else 3
    room = bridge.max_shared_bytes() // (2 * block_k)
    while (block_m + block_n) * stages > room:
        if block_n > 128:
            block_n //= 2
        else:
            stages -= 1
    return {
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": 4 if block_m * block_n < 2**14 else 8,
        "num_stages": stages,
    }


def multiply(x: Any, w: Any, group_sizes: Any, turned: bool) -> jax.Array:
    """`turned`: w is `[e, n, k]`, else `[e, k, n]`."""
    e, n, k = w.shape if turned else (w.shape[0], w.shape[2], w.shape[1])
    r = x.shape[0]
    block_m = rows_of_tile(r, e)
    found = sizes(block_m, n, k)
    tiles, count = row_tiles(group_sizes, r, block_m)
    columns = -(-n // found["BLOCK_N"])
    [y] = bridge.triton_call(
        rows_kernel,
        x,
        w,
        tiles,
        count,
        out=[jax.ShapeDtypeStruct((r, n), x.dtype)],
        grid=(most_tiles(r, e, block_m) * columns,),
        N=n,
        K=k,
        E=e,
        STRIDE_N=k if turned else 1,
        STRIDE_K=1 if turned else n,
        BLOCK_M=block_m,
        COLUMNS=columns,
        BESIDE=min(BESIDE, columns),
        **found,
    )
    return y


def grouped_matmul(x, w, group_sizes, *, preferred_element_type=None):
    del preferred_element_type  # refused
    return multiply(x, w, group_sizes, turned=True)


def grouped_matmul_bwd(
    x, w, group_sizes, dy, *, preferred_element_type=None, wanted=(True, True)
):
    """(dx, dw), None for what is not wanted."""
    del preferred_element_type  # refused
    dx = dw = None
    if wanted[0]:
        dx = multiply(dy, w, group_sizes, turned=False)
    if wanted[1]:
        e, f, d = w.shape
        block_m = min(128, max(16, next_power_of_2(f)))
        found = sizes(block_m, d, 64)
        found["BLOCK_K"] = min(found["BLOCK_K"], rows_of_tile(x.shape[0], e))
        blocks, columns = -(-f // block_m), -(-d // found["BLOCK_N"])
        [dw] = bridge.triton_call(
            weights_kernel,
            dy,
            x,
            *group_rows(group_sizes, x.shape[0]),
            out=[jax.ShapeDtypeStruct(w.shape, w.dtype)],
            grid=(e * blocks * columns,),
            F=f,
            D=d,
            BLOCK_M=block_m,
            BLOCKS=blocks,
            COLUMNS=columns,
            BESIDE=min(BESIDE, columns),
            **found,
        )
    return dx, dw
