"""Products with interleaved rows and what stands around them: quantized_matmul.h."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import FLOATS, cpu_call
from jaxkern.cpu.quant.quantized_matmul import not_f32, not_int8, refusal
from jaxkern.primitives.quant.interleaved_tensor import ROWS


def unsupported_int8(x, tiles, residual=None, *, qtype, compute_dtype) -> str | None:
    return not_int8(compute_dtype) or refuses(x, tiles, residual, qtype)


def unsupported_f32(x, tiles, residual=None, *, qtype, compute_dtype) -> str | None:
    return not_f32(compute_dtype) or refuses(x, tiles, residual, qtype)


def refuses(x, tiles, residual, qtype: str) -> str | None:
    if residual is not None and residual.dtype != x.dtype:
        return f"`residual` is {residual.dtype}, `x` {x.dtype}"
    return refusal(x.dtype, qtype, x, tiles)


def unsupported_norm_int8(x, tiles, norm, *, qtype, compute_dtype, eps) -> str | None:
    return not_int8(compute_dtype) or refuses_norm(x, tiles, norm, qtype)


def unsupported_norm_f32(x, tiles, norm, *, qtype, compute_dtype, eps) -> str | None:
    return not_f32(compute_dtype) or refuses_norm(x, tiles, norm, qtype)


def unsupported_gate_int8(up, *, activation, **others) -> str | None:
    return refuses_gate(up, activation) or unsupported_norm_int8(**others)


def unsupported_gate_f32(up, *, activation, **others) -> str | None:
    return refuses_gate(up, activation) or unsupported_norm_f32(**others)


def refuses_gate(up, activation: str) -> str | None:
    if activation != "silu":
        return f"`activation` is {activation!r}, not 'silu'"
    return None if up is None else "`up` is given: the kernel multiplies it too"


def refuses_norm(x, tiles, norm, qtype: str) -> str | None:
    if norm is not None and norm.dtype not in FLOATS:
        return f"`norm` is {norm.dtype}, not one of {', '.join(FLOATS)}"
    return refusal(x.dtype, qtype, x, tiles)


def norm_int8(x, tiles, norm, *, qtype, compute_dtype, eps):
    del compute_dtype
    return multiply(x, tiles, norm, qtype, eps, int8_activations=True)


def norm_f32(x, tiles, norm, *, qtype, compute_dtype, eps):
    del compute_dtype
    return multiply(x, tiles, norm, qtype, eps)


def swiglu_int8(x, tiles, norm, up, *, qtype, compute_dtype, eps, activation):
    del compute_dtype, up, activation  # refused
    return multiply_gated(x, tiles, norm, qtype, eps, int8_activations=True)


def swiglu_f32(x, tiles, norm, up, *, qtype, compute_dtype, eps, activation):
    del compute_dtype, up, activation  # refused
    return multiply_gated(x, tiles, norm, qtype, eps)


def multiply_gated(
    x, tiles, norm, qtype: str, eps: float, int8_activations: bool = False
):
    _, u, tile_bytes = tiles.shape
    tiles = tiles.reshape(2 * u, tile_bytes)
    return multiply(x, tiles, norm, qtype, eps, int8_activations, gated=True)


def multiply(
    x,
    tiles,
    norm,
    qtype: str,
    eps: float,
    int8_activations: bool = False,
    gated: bool = False,
):
    rows = math.prod(x.shape[:-1])
    u = tiles.shape[0] // (2 if gated else 1)
    result = jax.ShapeDtypeStruct((rows, u * ROWS), x.dtype)
    options: dict = dict(
        qtype=qtype, interleaved=True, int8_activations=int8_activations, gated=gated
    )
    x2 = x.reshape(rows, x.shape[-1])
    if norm is None:
        y = cpu_call("quantized_matmul", result, x2, tiles, **options)
    else:
        norm = norm.astype(jnp.float32)
        options["eps"] = np.float32(eps)
        y = cpu_call("rms_norm_matmul", result, x2, norm, tiles, **options)
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
