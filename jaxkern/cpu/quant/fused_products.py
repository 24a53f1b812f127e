"""Products with interleaved rows and what follows them; see quantized_matmul.h."""

import math

import jax

from jaxkern.cpu.cpu_call import cpu_call
from jaxkern.cpu.quant.quantized_matmul import not_f32, not_int8, refusal
from jaxkern.primitives.quant.interleaved_tensor import ROWS


def refuses_int8(x, tiles, residual=None, *, qtype, compute_dtype) -> str | None:
    return not_int8(compute_dtype) or refuses(x, tiles, residual, qtype)


def refuses_f32(x, tiles, residual=None, *, qtype, compute_dtype) -> str | None:
    return not_f32(compute_dtype) or refuses(x, tiles, residual, qtype)


def refuses(x, tiles, residual, qtype: str) -> str | None:
    if residual is not None and residual.dtype != x.dtype:
        return f"`residual` is {residual.dtype}, `x` {x.dtype}"
    return refusal(x.dtype, qtype, x, tiles)


def swiglu_int8(x, tiles, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_gated(x, tiles, qtype, int8_activations=True)


def swiglu_f32(x, tiles, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_gated(x, tiles, qtype)


def multiply_gated(x, tiles, qtype: str, int8_activations: bool = False):
    _, u, tile_bytes = tiles.shape
    rows = math.prod(x.shape[:-1])
    y = cpu_call(
        "quantized_matmul",
        jax.ShapeDtypeStruct((rows, u * ROWS), x.dtype),
        x.reshape(rows, x.shape[-1]),
        tiles.reshape(2 * u, tile_bytes),
        qtype=qtype,
        interleaved=True,
        int8_activations=int8_activations,
        gated=True,
    )
    return y.reshape(*x.shape[:-1], u, ROWS)


def add_int8(x, tiles, residual, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_and_add(x, tiles, residual, qtype, int8_activations=True)


def add_f32(x, tiles, residual, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_and_add(x, tiles, residual, qtype)


def multiply_and_add(x, tiles, residual, qtype: str, int8_activations: bool = False):
    rows = math.prod(x.shape[:-1])
    f = tiles.shape[0] * ROWS
    y = cpu_call(
        "quantized_matmul_add",
        jax.ShapeDtypeStruct((rows, f), x.dtype),
        x.reshape(rows, x.shape[-1]),
        tiles,
        residual.reshape(rows, f),
        qtype=qtype,
        interleaved=True,
        int8_activations=int8_activations,
    )
    return y.reshape(residual.shape)
