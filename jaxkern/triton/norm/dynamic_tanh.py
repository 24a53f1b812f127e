"""y = tanh(alpha x) * weight + bias, element by element, and its gradients.

Forward: a program has a tile [ROWS, BLOCK] of x `[num_rows, d]`. Backward: a program
walks down one stripe of BLOCK columns and takes every PROGRAMS-th tile of it; the sums
over rows stay in registers. With z = alpha x and s = 1 - tanh(z)**2:

    dx = alpha dy weight s       dalpha = sum(x dy weight s)
    dweight = sum(dy tanh(z))    dbias = sum(dy)
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.activation.softcap import softcap_slope, softcapped
from jaxkern.triton.norm.row_tiles import factor, read, summed, write

slower = "as far as is known: it fuses work on single elements; not measured"
WAVES = 4  # programs of a multiprocessor, backward


def tile(x: jax.Array, elements: int) -> dict:
    """ROWS times BLOCK is about `elements`, 16 of them a thread."""
    rows, d = num_rows(x), x.shape[-1]
    block = min(next_power_of_2(d), 1024)
    together = max(1, min(elements // block, next_power_of_2(rows)))
    warps = max(1, min(8, together * block // (16 * WARP)))
    sizes = {"BLOCK": block, "ROWS": together, "num_warps": warps}
    return sizes | {"NUM_ROWS": rows, "D": d}


@jit
def dynamic_tanh_fwd_kernel(
    x_ptr,
    alpha_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    mask = (rows < NUM_ROWS) & inside
    at = rows.to(tl.int64) * D + columns
    alpha = tl.load(alpha_ptr).to(tl.float32)
    y = softcapped(alpha * read(x_ptr, at, mask), 1.0)
    y *= factor(weight_ptr, columns, inside, 0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
    write(y_ptr, at, y, mask)


def dynamic_tanh(
    x: jax.Array, alpha: jax.Array, weight: jax.Array | None, bias: jax.Array | None
) -> jax.Array | None:
    sizes = tile(x, 2048)
    [y] = sparse_call(
        dynamic_tanh_fwd_kernel,
        (-(-sizes["NUM_ROWS"] // sizes["ROWS"]), -(-sizes["D"] // sizes["BLOCK"])),
        {"x_ptr": x, "alpha_ptr": alpha, "weight_ptr": weight, "bias_ptr": bias},
        {"y_ptr": like(x)},
        sizes,
    )
    return y


@jit
def dynamic_tanh_bwd_kernel(
    x_ptr,
    alpha_ptr,
    weight_ptr,
    dy_ptr,
    dx_ptr,
    dalpha_ptr,
    dweight_ptr,
    dbias_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    program, stripe = tl.program_id(0), tl.program_id(1)
    columns = stripe * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    alpha = tl.load(alpha_ptr).to(tl.float32)
    scale = factor(weight_ptr, columns, inside, 0.0)
    dalpha = tl.zeros([ROWS, BLOCK], tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(program, num_blocks, PROGRAMS):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (rows < NUM_ROWS) & inside
        at = rows.to(tl.int64) * D + columns
        x, dy = read(x_ptr, at, mask), read(dy_ptr, at, mask)
        z = alpha * x
        dz = dy * scale * softcap_slope(z, 1.0)
        write(dx_ptr, at, alpha * dz, mask)
        if dalpha_ptr is not None:
            dalpha += x * dz
        if dweight_ptr is not None:
            dweight += dy * softcapped(z, 1.0)
        if dbias_ptr is not None:
            dbias += dy
    each = tl.arange(0, BLOCK)
    partial = program.to(tl.int64) * D + stripe * BLOCK + each
    present = stripe * BLOCK + each < D
    if dalpha_ptr is not None:
        stripes: tl.constexpr = (D + BLOCK - 1) // BLOCK
        tl.store(dalpha_ptr + program * stripes + stripe, tl.sum(dalpha))
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), present)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), present)


def dynamic_tanh_bwd(
    x: jax.Array,
    alpha: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    dy: jax.Array,
    *,
    wanted: Sequence[bool],
) -> tuple[Any, ...]:
    sizes = tile(x, 4096)
    d, blocks = sizes["D"], -(-sizes["NUM_ROWS"] // sizes["ROWS"])
    stripes = -(-d // sizes["BLOCK"])
    programs = max(1, min(blocks, WAVES * num_sms() // max(stripes, 1)))
    sums = (programs, stripes), (programs, d), (programs, d)
    operands = x, alpha, weight, bias
    present = [w and o is not None for w, o in zip(wanted, operands, strict=True)]
    partial = [
        jax.ShapeDtypeStruct(shape, jnp.float32) if w else None
        for w, shape in zip(present[1:], sums, strict=True)
    ]
    dx, dalpha, dweight, dbias = sparse_call(
        dynamic_tanh_bwd_kernel,
        (programs, stripes),
        {"x_ptr": x, "alpha_ptr": alpha, "weight_ptr": weight, "dy_ptr": dy},
        {
            "dx_ptr": like(x) if present[0] else None,
            "dalpha_ptr": partial[0],
            "dweight_ptr": partial[1],
            "dbias_ptr": partial[2],
        },
        sizes | {"PROGRAMS": programs},
    )
    if dalpha is not None:
        dalpha = dalpha.sum().astype(alpha.dtype)
    return dx, dalpha, summed(dweight, weight), summed(dbias, bias)
