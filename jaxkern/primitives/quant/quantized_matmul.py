"""Product with a quantised weight: y = x w^T, w = scale * code + offset; GGUF here."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.dense_product import result_dtype
from jaxkern.primitives.quant.gguf_tensor import GGUF, GGUFTensor
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor, reader_of

QUANTIZED_MATMUL: dict[type, Callable] = {}  # (x, w, compute_dtype) -> [..., f]


@check_arguments
def quantized_matmul(
    x: Float[Array, "... d"],
    w: QuantizedTensor,
    *,
    compute_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "... f"]:
    """Matrix product with a quantised weight, which is decoded on the way.

        y[..., f] = sum_d x[..., d] * w[f, d]

    Sums in float32 (float64 for a float64 `x`), rounds once to x.dtype. Differentiable
    in `x` and in the float arrays of `w`; a `GGUFTensor` has none. llama.cpp rounds
    `x` to 8 bits first, mlx-native rounds `x` and `w` to bfloat16: here both are exact
    unless `compute_dtype` says otherwise.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[f, d]`, any container. For a stack of weights use `jax.vmap`.
      compute_dtype: dtype to which `x` and the decoded `w` are rounded before the
        product, such as bfloat16; None for float32. int8 rounds `x` alone, to 8 bits
        with a scale for each 32 columns as llama.cpp does; the gradient passes
        straight through.
      preferred_element_type: dtype of y, to which the sums are rounded; float32 gives
        the sums for an x of 16 bits themselves.

    Returns:
      y: `[..., f]`, dtype of x unless another is preferred.

    Raises:
      TypeError: `w` is no quantised tensor `[f, d]`, its `d` is not that of `x`, or no
        float is preferred.

    Example:
      >>> w = jaxkern.quantize_gguf(jnp.ones((4, 32)), "Q8_0")
      >>> jaxkern.quantized_matmul(jnp.ones((1, 32)), w)
      Array([[31.998, 31.998, 31.998, 31.998]], dtype=float32)
    """
    op = "quantized_matmul"
    read = reader_of(op, QUANTIZED_MATMUL, w, ndim=2)
    result = result_dtype(op, preferred_element_type, x.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, result))  # y is rounded to its dtype
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    return read(wide, w, dtype).astype(result)


quantized_matmul_p = GGUF.matmul("quantized_matmul", __name__)
QUANTIZED_MATMUL[GGUFTensor] = GGUF.reader(quantized_matmul_p, "compute_dtype")
