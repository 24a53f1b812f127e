"""RMSNorm, of a sum or not, rounded to 8 bits with a scale for each row or block.

    u = x + residual;  y = u / rms(u) * (weight + offset);  code = round(y / scale)

The largest element of a row is that of |u * weight| times rstd, so that one pass finds
both; a second one, mostly from the caches, rounds. Codes are half the bytes of a
bfloat16 norm: 1.5 tensors are moved where that moves 2.
"""

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call
from jaxkern.gpu.device import compute_capability, next_power_of_2
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.norm.row_tiles import (
    factor,
    forward_tile,
    read,
    read_and_keep,
    write,
)

LONGEST = 8192  # elements of a block
FP8_CONVERSION = 89  # the compute capability that has it


def unsupported(*, x, block, **named) -> str | None:
    if block < x.shape[-1]:
        if next_power_of_2(block) != block:
            return f"blocks of {block} elements, not a power of 2"
        if block > LONGEST:
            return f"blocks of {block} elements, more than {LONGEST}"
    return triton_call.unsupported(x=x, **named)


@jit
def round_to_int8(v):
    # adding 1.5 * 2**23 leaves no digit behind the point: rounds to nearest even
    return ((v + 12582912.0) - 12582912.0).to(tl.int8)


@jit
def round_to_e4m3fn(v, HARDWARE: tl.constexpr):
    """The bits of the nearest 8-bit float, ties to even, for |v| up to 448."""
    if HARDWARE:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # 3 of 23 digits stay; the exponent's bias is 7 and not 127
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # below 2**-6 codes are multiples of 2**-9, the last digit of 2**14 + |v|
        shifted = tl.abs(v) + 16384.0
        small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
        return tl.where(v == v, code, 0x7F).to(tl.uint8)


@jit
def over_row(x):
    return tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True)


@jit
def norm_quantized_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    codes_ptr,
    scales_ptr,
    total_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    LARGEST: tl.constexpr,
    FP8: tl.constexpr,
    HARDWARE: tl.constexpr,
    BY_ROW: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A chunk is [ROWS, BLOCKS, WIDTH]; a block has a scale, or the row (BY_ROW)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    present = rows < NUM_ROWS
    start = rows.to(tl.int64) * D
    block = tl.arange(0, BLOCKS)[None, :, None]
    chunk = block * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    squares = tl.zeros([ROWS, BLOCKS, WIDTH], tl.float32)
    top = tl.zeros([ROWS, BLOCKS, WIDTH], tl.float32)
    for first in range(0, D, BLOCKS * WIDTH):
        columns = first + chunk
        mask = present & (columns < D)
        u = read_and_keep(x_ptr, start + columns, mask)
        if residual_ptr is not None:
            u += read_and_keep(residual_ptr, start + columns, mask)
        squares += u * u
        if BY_ROW:
            u *= factor(weight_ptr, columns, columns < D, OFFSET)
            top = tl.maximum(top, tl.abs(u))
    rstd = tl.rsqrt(over_row(squares) / D + EPS)
    if BY_ROW:
        top = tl.max(tl.max(top, 2, keep_dims=True), 1, keep_dims=True)
        scale = top * rstd / LARGEST
        scale = tl.where(scale == 0.0, 1.0, scale)
        tl.store(scales_ptr + rows, scale, present)
    for first in range(0, D, BLOCKS * WIDTH):
        columns = first + chunk
        mask = present & (columns < D)
        u = read(x_ptr, start + columns, mask)
        if residual_ptr is not None:
            u += read(residual_ptr, start + columns, mask)
            write(total_ptr, start + columns, u, mask)
        u *= factor(weight_ptr, columns, columns < D, OFFSET)
        if not BY_ROW:
            scale = tl.max(tl.abs(u), 2, keep_dims=True) * rstd / LARGEST
            scale = tl.where(scale == 0.0, 1.0, scale)
            index = first // WIDTH + block
            at = rows.to(tl.int64) * NUM_BLOCKS + index
            tl.store(scales_ptr + at, scale, present & (index < NUM_BLOCKS))
        v = u * (rstd / scale)
        if FP8:
            codes = round_to_e4m3fn(v, HARDWARE)
        else:
            codes = round_to_int8(v)
        write(codes_ptr, start + columns, codes, mask)


def norm_quantized(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array | None,
    *,
    format: str,
    block: int,
    eps: float,
    offset: float,
) -> tuple[jax.Array | None, ...]:
    """(codes, scales, total); the total without a residual is None."""
    *lead, d = x.shape
    rows, by_row = num_rows(x), block >= d
    num_blocks = 1 if by_row else -(-d // block)
    fp8 = format == "e4m3fn"
    sizes = forward_tile(rows, d)
    chunk = sizes.pop("BLOCK")
    width = chunk if by_row else block
    chunk = max(chunk, width)
    results = {
        "codes_ptr": jax.ShapeDtypeStruct(x.shape, jnp.uint8 if fp8 else jnp.int8),
        "scales_ptr": jax.ShapeDtypeStruct((*lead, num_blocks), jnp.float32),
        "total_ptr": like(residual),
    }
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        "LARGEST": 448.0 if fp8 else 127.0,
        "FP8": fp8,
        "HARDWARE": compute_capability() >= FP8_CONVERSION,
        "BY_ROW": by_row,
        "NUM_BLOCKS": num_blocks,
        "BLOCKS": chunk // width,
        "WIDTH": width,
    }
    return sparse_call(
        norm_quantized_kernel,
        (-(-rows // sizes["ROWS"]),),
        {"x_ptr": x, "residual_ptr": residual, "weight_ptr": weight},
        results,
        sizes | constants,
    )


def rms_norm_quantized_fwd(x, weight, **options):
    codes, scales, _ = norm_quantized(x, None, weight, **options)
    return codes, scales


def add_rms_norm_quantized_fwd(x, residual, weight, **options):
    return norm_quantized(x, residual, weight, **options)
