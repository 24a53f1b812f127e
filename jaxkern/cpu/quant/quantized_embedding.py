"""Rows of a GGUF table on a CPU; the kernel is in quantized_matmul.h."""

import math

import jax

from jaxkern.cpu.cpu_call import cpu_call
from jaxkern.cpu.quant.quantized_matmul import refusal
from jaxkern.cpu.quant.quantized_matmul_id import as_int32
from jaxkern.primitives.quant.gguf_blocks import elements_per_row


def unsupported(ids, blocks, *, qtype, dtype) -> str | None:
    return refusal(dtype, qtype, ids, blocks)


def quantized_embedding(ids, blocks, *, qtype, dtype):
    d = elements_per_row("quantized_embedding", qtype, blocks.shape[-1])
    return look_up(ids, blocks, blocks.shape[0], d, qtype=qtype, dtype=dtype)


def look_up(ids, w, v: int, d: int, *, qtype: str, dtype, interleaved: bool = False):
    """Rows `ids` of `w`, blocks `[v, row_bytes]` or their tiles: `[..., d]`."""
    n = math.prod(ids.shape)
    y = cpu_call(
        "quantized_embedding",
        jax.ShapeDtypeStruct((n, d), dtype),
        as_int32(ids, v).reshape(n),
        w,
        qtype=qtype,
        interleaved=interleaved,
    )
    return y.reshape(*ids.shape, d)
