"""Products with GGUF weights on a CPU; the kernel is quantized_matmul.h.

Two forms: activations as float32, or rounded to int8 in blocks of 32.
"""

import math

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import FLOATS, cpu_call, missing
from jaxkern.primitives.quant.block_formats import KERNEL_FORMATS
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS, FLOAT_TYPES

WITHOUT_KERNEL = tuple(
    name
    for name, form in BLOCK_FORMATS.items()
    if form.unpack is not None and name not in KERNEL_FORMATS
)


def refusal(x_dtype, qtype: str, *operands) -> str | None:
    """Why no kernel of this family runs."""
    if x_dtype not in FLOATS:
        return f"dtype {x_dtype} is not one of {', '.join(FLOATS)}"
    if qtype in FLOAT_TYPES:
        return f"{qtype} has no blocks: XLA multiplies it"
    if qtype not in KERNEL_FORMATS:
        return f"{qtype} has no kernel"
    if not all(math.prod(a.shape) for a in operands):
        return "there are no elements"
    return missing()


def not_int8(compute_dtype) -> str | None:
    return None if compute_dtype == jnp.int8 else "activations are not to be rounded"


def not_f32(compute_dtype) -> str | None:
    exact = compute_dtype is None or compute_dtype == jnp.float32
    return None if exact else f"compute_dtype is {compute_dtype}"


def unsupported_int8(x, blocks, *, qtype, compute_dtype) -> str | None:
    return not_int8(compute_dtype) or refusal(x.dtype, qtype, x, blocks)


def unsupported_f32(x, blocks, *, qtype, compute_dtype) -> str | None:
    return not_f32(compute_dtype) or refusal(x.dtype, qtype, x, blocks)


def int8_activations(x, blocks, *, qtype, compute_dtype):
    del compute_dtype  # the row asked
    return multiply(x, blocks, blocks.shape[0], qtype=qtype, int8_activations=True)


def f32_activations(x, blocks, *, qtype, compute_dtype):
    del compute_dtype
    return multiply(x, blocks, blocks.shape[0], qtype=qtype)


def multiply(
    x, w, f: int, *, qtype: str, interleaved: bool = False, int8_activations=False
):
    """x `[..., d]` times blocks `[f, row_bytes]` or their tiles: `[..., f]`."""
    rows = math.prod(x.shape[:-1])
    y = cpu_call(
        "quantized_matmul",
        jax.ShapeDtypeStruct((rows, f), x.dtype),
        x.reshape(rows, x.shape[-1]),
        w,
        qtype=qtype,
        interleaved=interleaved,
        int8_activations=int8_activations,
        gated=False,
    )
    return y.reshape(*x.shape[:-1], f)
