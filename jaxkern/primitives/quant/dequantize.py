"""Dequantisation: w = scale * code + offset, group by group; here the GGUF blocks."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.gguf_blocks import decode_rows, elements_per_row
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.quantized_tensor import (
    QuantizedTensor,
    float_dtype,
    reader_of,
)

DEQUANTIZE: dict[type, Callable] = {}  # (w, dtype) -> [..., d], by type of w


@check_arguments
def dequantize(
    w: QuantizedTensor, *, dtype: DTypeLike = jnp.float32
) -> Float[Array, "... d"]:
    """The weights of a quantised tensor as an array.

        w = scale * code + offset

    Computed in float32 and rounded once to `dtype`. For a `GGUFTensor` float32 is
    bit-equal to `gguf.quants.dequantize` (but for the payload of a NaN), and under
    `jit` peak memory is the bytes and the result; for Q2_K to Q6_K also one and a half
    bytes per weight.

    Args:
      w: `[..., d]`, any container.
      dtype: float dtype of the result.

    Returns:
      `[..., d]`, `dtype`.

    Raises:
      TypeError: `w` is no well-formed quantised tensor, or `dtype` is not a float.
    """
    read = reader_of("dequantize", DEQUANTIZE, w)
    return read(w, float_dtype("dequantize", dtype))


def dequantize_reference(
    blocks: UInt8[Array, "... row_bytes"], *, qtype: str, dtype: jnp.dtype
) -> Float[Array, "... d"]:
    elements_per_row("dequantize", qtype, blocks.shape[-1])
    return decode_rows(blocks, qtype, dtype=dtype)


dequantize_p = kernel_primitive(
    dequantize_reference,
    replicated=("row_bytes", "d"),  # a block spans both
)


def dequantize_gguf(w: GGUFTensor, dtype: jnp.dtype) -> Float[Array, "... d"]:
    return dequantize_p(w.blocks, qtype=w.qtype, dtype=dtype)


DEQUANTIZE[GGUFTensor] = dequantize_gguf
