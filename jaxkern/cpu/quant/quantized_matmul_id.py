"""Products with routed GGUF experts on a CPU; the kernel is quantized_matmul.h."""

import math

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import cpu_call
from jaxkern.cpu.quant.quantized_matmul import not_f32, not_int8, refusal


def unsupported_int8(x, ids, blocks, *, qtype, compute_dtype) -> str | None:
    return not_int8(compute_dtype) or refusal(x.dtype, qtype, x, ids, blocks)


def unsupported_f32(x, ids, blocks, *, qtype, compute_dtype) -> str | None:
    return not_f32(compute_dtype) or refusal(x.dtype, qtype, x, ids, blocks)


def int8_activations(x, ids, blocks, *, qtype, compute_dtype):
    del compute_dtype
    f = blocks.shape[1]
    return multiply_routed(x, ids, blocks, f, qtype=qtype, int8_activations=True)


def f32_activations(x, ids, blocks, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_routed(x, ids, blocks, blocks.shape[1], qtype=qtype)


def multiply_routed(
    x, ids, w, f: int, *, qtype: str, interleaved: bool = False, int8_activations=False
):
    """x `[..., d]`, ids `[..., k]`, experts `[e, f, row_bytes]`: `[..., k, f]`."""
    rows, k = math.prod(x.shape[:-1]), ids.shape[-1]
    y = cpu_call(
        "quantized_matmul_id",
        jax.ShapeDtypeStruct((rows, k, f), x.dtype),
        x.reshape(rows, x.shape[-1]),
        as_int32(ids, w.shape[0]).reshape(rows, k),
        w,
        qtype=qtype,
        interleaved=interleaved,
        int8_activations=int8_activations,
    )
    return y.reshape(*ids.shape, f)


def as_int32(ids, count: int):
    """Ids below `count` as they are, others as -1, which no dtype can wrap."""
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    return jnp.where((ids >= 0) & (ids < count), ids, -1).astype(jnp.int32)
