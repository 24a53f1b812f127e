"""Rows of packed codes as floats: whole weights, or the rows that ids name.

w = scale * (code - zero) + offset, in float32, rounded once
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.triton.quant.row_codes import BITS
from jaxkern.triton.quant.row_problem import Rows

COLUMNS = 1024  # of a program


@jit
def float_of_e4m3(byte):
    """Exact; 0x7F and 0xFF are NaN."""
    normal = (((byte & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where((byte & 120) == 0, (byte & 7).to(tl.float32) * 0.001953125, normal)
    size = tl.where((byte & 127) == 127, float("nan"), size)
    return tl.where((byte & 128) != 0, -size, size)


@jit
def float_of_code(code, FORMAT: tl.constexpr):
    if FORMAT == "i4":
        return ((code ^ 8) - 8).to(tl.float32)
    elif FORMAT == "i8":
        return ((code ^ 128) - 128).to(tl.float32)
    elif FORMAT == "e4m3":
        return float_of_e4m3(code)
    elif FORMAT == "e2m1":
        normal = (((code & 7) << 22) + (126 << 23)).to(tl.float32, bitcast=True)
        size = tl.where((code & 6) == 0, (code & 1).to(tl.float32) * 0.5, normal)
        return tl.where((code & 8) != 0, -size, size)
    else:
        return code.to(tl.float32)


@jit
def float_of_scale(scale, KIND: tl.constexpr):
    if KIND == "e8m0":
        byte = scale.to(tl.int32)
        word = tl.where(byte == 0, 1 << 22, byte << 23)
        word = tl.where(byte == 255, 0x7FC00000, word)
        return word.to(tl.float32, bitcast=True)
    elif KIND == "e4m3":
        return float_of_e4m3(scale.to(tl.int32))
    else:
        return scale.to(tl.float32)


@jit
def row_decode_kernel(
    ids_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    factors_ptr,
    y_ptr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS_OF_SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    ZERO: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS of one row; codes `[ROWS, D * BITS / 32]` words."""
    out = tl.program_id(0).to(tl.int64)
    row = out
    known = True
    if ids_ptr is not None:
        row = tl.load(ids_ptr + out).to(tl.int64)
        known = (row >= 0) & (row < ROWS)
        row = tl.where(known, row, 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    WORDS: tl.constexpr = D * BITS // 32
    words = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + row * WORDS
    place = column * BITS // 32
    bit = column * BITS % 32
    code = tl.load(words + place, inside, 0) >> bit
    if 32 % BITS != 0:
        crossing = bit + BITS > 32
        rest = tl.load(words + place + 1, inside & crossing, 0)
        code |= tl.where(crossing, rest << ((32 - bit) & 31), 0)
    code = (code & ((1 << BITS) - 1)).to(tl.int32)
    at = row // ROWS_OF_SCALE * GROUPS + column // GROUP
    scale = float_of_scale(tl.load(scales_ptr + at, inside, 0), KIND)
    value = float_of_code(code, FORMAT)
    if OFFSET == "zero":
        value -= tl.load(offsets_ptr + at, inside, 0.0).to(tl.float32)
    elif ZERO != 0:
        value -= ZERO
    if factors_ptr is not None:
        scale *= tl.load(factors_ptr + row).to(tl.float32)
    value *= scale
    if OFFSET == "bias":
        value += tl.load(offsets_ptr + at, inside, 0.0).to(tl.float32)
    value = tl.where(known, value, 0.0)
    tl.store(y_ptr + out * D + column, value.to(y_ptr.dtype.element_ty), inside)


def decoded(w: Rows, dtype: Any, ids: jax.Array | None = None) -> jax.Array:
    """All rows `[rows, columns]`, or those of ids `[...]`, zeros for an id outside."""
    shape = (w.rows,) if ids is None else ids.shape
    columns = min(COLUMNS, next_power_of_2(w.columns))
    flat = None if ids is None else ids.reshape(-1).astype(jnp.int32)
    count = w.rows if flat is None else flat.shape[0]
    [y] = sparse_call(
        row_decode_kernel,
        (count, -(-w.columns // columns)),
        {
            "ids_ptr": flat,
            "codes_ptr": w.codes,
            "scales_ptr": w.scales,
            "offsets_ptr": w.offsets,
            "factors_ptr": w.factors,
        },
        {"y_ptr": jax.ShapeDtypeStruct((count, w.columns), dtype)},
        {
            "ROWS": w.rows,
            "D": w.columns,
            "GROUP": w.group,
            "GROUPS": w.scales.shape[-1],
            "ROWS_OF_SCALE": w.rows_of_scale,
            "FORMAT": w.format,
            "BITS": BITS[w.format],
            "KIND": w.kind,
            "OFFSET": w.offset,
            "ZERO": w.zero,
            "COLUMNS": columns,
            "num_warps": max(1, min(4, columns // 256)),
        },
    )
    assert y is not None
    return y.reshape(*shape, w.columns)


def all_decoded(w: Rows, dtype: Any) -> jax.Array:
    """Weights of any number of dims; each row has scales of its own."""

    def as_rows(a):
        return None if a is None else a.reshape(-1, a.shape[-1])

    factors = None if w.factors is None else w.factors.reshape(-1)
    flat = dataclasses.replace(
        w,
        codes=as_rows(w.codes),
        scales=as_rows(w.scales),
        offsets=as_rows(w.offsets),
        factors=factors,
    )
    return decoded(flat, dtype).reshape(*w.codes.shape[:-1], w.columns)
