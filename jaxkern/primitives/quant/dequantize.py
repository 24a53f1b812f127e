"""Dequantisation: w = scale * code + offset, group by group; here the GGUF blocks."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.quant.gguf_tensor import GGUF, GGUFTensor
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

    Example:
      >>> w = jaxkern.quantize_gguf(jnp.arange(32.0), "Q8_0")
      >>> jaxkern.dequantize(w)[:4]
      Array([0.   , 0.977, 1.953, 2.93 ], dtype=float32)
    """
    read = reader_of("dequantize", DEQUANTIZE, w)
    return read(w, float_dtype("dequantize", dtype))


dequantize_p = GGUF.dequantize("dequantize", __name__)
DEQUANTIZE[GGUFTensor] = GGUF.reader(dequantize_p, "dtype")
