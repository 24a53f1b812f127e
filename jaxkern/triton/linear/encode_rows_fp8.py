"""Rows in 8-bit floats with a scale each, or swiglu of them, in one pass.

    codes[i] = e4m3fn(x[i] / scale[i]),  scale[i] = 2**e >= max|x[i]| / 448

A program takes ROWS rows. One of up to LONGEST elements stays in registers from its
largest element to its codes; a longer one is read twice. Sizes are compared as
integers, bits without the sign: NaN is larger than infinity, and no maximum loses it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import WARP, compute_capability, next_power_of_2
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.rms_norm_quantized import FP8_CONVERSION, round_to_e4m3fn

LONGEST = 16384  # elements of a row in registers
TOGETHER = 2048  # elements of a program's rows, where several are short
CHUNK = 4096  # elements of a longer row that are read at once


@jit
def values(
    x_ptr,
    up_ptr,
    row,
    column,
    mask,
    D: tl.constexpr,
    APART: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    """x, or swiglu of gate and up; APART: elements from a row to the next."""
    at = row.to(tl.int64) * APART + column
    x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
    if GATED:
        if up_ptr is not None:
            u = tl.load(up_ptr + at, mask, 0.0).to(tl.float32)
        else:
            u = tl.load(x_ptr + D + at, mask, 0.0).to(tl.float32)
        if LIMIT is not None:  # NaN stays
            x = tl.where(x > LIMIT, LIMIT, x)
            u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
        if UP_OFFSET != 0.0:
            u += UP_OFFSET
        x = x / (1.0 + tl.exp(-ALPHA * x)) * u
    return x


@jit
def size_of(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of_size(top):
    """The scale of a row whose largest size has these bits, and 1 / scale."""
    # carries into the exponent where the digits are larger than those of 448
    power = tl.maximum(((top + 0x1FFFFF) >> 23) - 135, -110)
    power = tl.where(top == 0, 0, power)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
    is_finite = top < 0x7F800000
    scale = tl.where(is_finite, scale, float("nan"))
    return scale, tl.where(is_finite, inverse, float("nan"))


@jit
def encode_rows_fp8_kernel(
    x_ptr,
    up_ptr,
    codes_ptr,
    scales_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    APART: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    present = row < NUM_ROWS
    column = tl.arange(0, BLOCK)[None, :]
    codes_row = codes_ptr + row.to(tl.int64) * D
    if D <= BLOCK:
        mask = present & (column < D)
        x = values(
            x_ptr, up_ptr, row, column, mask, D, APART, GATED, ALPHA, LIMIT, UP_OFFSET
        )
        scale, inverse = scale_of_size(tl.max(size_of(x), 1, keep_dims=True))
        tl.store(codes_row + column, round_to_e4m3fn(x * inverse, HARDWARE), mask)
    else:
        largest = tl.zeros([ROWS, BLOCK], tl.int32)
        for first in range(0, D, BLOCK):
            at = first + column
            mask = present & (at < D)
            x = values(
                x_ptr, up_ptr, row, at, mask, D, APART, GATED, ALPHA, LIMIT, UP_OFFSET
            )
            largest = tl.maximum(largest, size_of(x))
        scale, inverse = scale_of_size(tl.max(largest, 1, keep_dims=True))
        for first in range(0, D, BLOCK):
            at = first + column
            mask = present & (at < D)
            x = values(
                x_ptr, up_ptr, row, at, mask, D, APART, GATED, ALPHA, LIMIT, UP_OFFSET
            )
            tl.store(codes_row + at, round_to_e4m3fn(x * inverse, HARDWARE), mask)
    tl.store(scales_ptr + row, scale, present)


def tile(rows: int, d: int) -> dict[str, int]:
    """About 16 elements a thread."""
    block = next_power_of_2(d)
    if block > LONGEST:
        return {"BLOCK": CHUNK, "ROWS": 1, "num_warps": 8}
    together = max(1, min(TOGETHER // block, next_power_of_2(rows)))
    warps = max(1, min(16, together * block // (16 * WARP)))
    return {"BLOCK": block, "ROWS": together, "num_warps": warps}


def encoded(
    x: jax.Array, up: jax.Array | None, d: int, options: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    rows, lead = num_rows(x), x.shape[:-1]
    sizes = tile(rows, d)
    codes, scales = sparse_call(
        encode_rows_fp8_kernel,
        (-(-rows // sizes["ROWS"]),),
        {"x_ptr": x, "up_ptr": up},
        {
            "codes_ptr": jax.ShapeDtypeStruct((*lead, d), jnp.uint8),
            "scales_ptr": jax.ShapeDtypeStruct(lead, jnp.float32),
        },
        {"NUM_ROWS": rows, "D": d, "APART": x.shape[-1]}
        | options
        | {"HARDWARE": compute_capability() >= FP8_CONVERSION}
        | sizes,
    )
    assert codes is not None and scales is not None
    return codes, scales


def encode_rows_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    plain = dict(GATED=False, ALPHA=1.0, LIMIT=None, UP_OFFSET=0.0)
    return encoded(x, None, x.shape[-1], plain)


def swiglu_rows_fp8(
    gate: jax.Array, up: jax.Array | None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    f = gate.shape[-1] // 2 if up is None else up.shape[-1]
    named = {name.upper(): value for name, value in options.items()}
    return encoded(gate, up, f, {"GATED": True, **named})
