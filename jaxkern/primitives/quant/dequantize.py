"""Dequantisation of GGUF block weights: w = scale * code + offset, group by group."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.gguf_blocks import decode_rows, elements_per_row
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor, check_gguf_tensor


def dequantize(
    w: GGUFTensor, *, dtype: DTypeLike = jnp.float32
) -> Float[Array, "... d"]:
    """The weights of a quantised tensor as an array.

        w = scale * code + offset

    float32 is bit-equal to `gguf.quants.dequantize` (but for the payload of a NaN), any
    other dtype is that result rounded once. Under `jit` peak memory is the bytes and
    the result; for Q2_K to Q6_K also one and a half bytes per weight.

    Args:
      w: `[..., d]`, any block format.
      dtype: float dtype of the result.

    Returns:
      `[..., d]`, `dtype`.

    Raises:
      TypeError: `w` is no GGUFTensor of whole blocks, or `dtype` is not a float.
    """
    check_gguf_tensor("dequantize", w)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"dequantize: `dtype` must be a float dtype, got {jnp.dtype(dtype)}."
        )
    return dequantize_p(w.blocks, qtype=w.qtype, dtype=jnp.dtype(dtype))


def dequantize_reference(
    blocks: UInt8[Array, "... row_bytes"], *, qtype: str, dtype: jnp.dtype
) -> Float[Array, "... d"]:
    elements_per_row("dequantize", qtype, blocks.shape[-1])
    return decode_rows(blocks, qtype, dtype=dtype)


dequantize_p = kernel_primitive(
    dequantize_reference,
    replicated=("row_bytes", "d"),  # a block spans both
)
