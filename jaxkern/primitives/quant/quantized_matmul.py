"""Product with a quantised weight: y = x w^T, w = scale * code + offset; GGUF here."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.decoded_products import decoded_product
from jaxkern.primitives.quant.gguf_blocks import decode_rows, elements_per_row
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor, reader_of

QUANTIZED_MATMUL: dict[type, Callable] = {}  # (x, w, compute_dtype) -> [..., f]


@check_arguments
def quantized_matmul(
    x: Float[Array, "... d"],
    w: QuantizedTensor,
    *,
    compute_dtype: DTypeLike | None = None,
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

    Returns:
      y: `[..., f]`, dtype of x.

    Raises:
      TypeError: `w` is no quantised tensor `[f, d]`, or its `d` is not that of `x`.
    """
    read = reader_of("quantized_matmul", QUANTIZED_MATMUL, w, ndim=2)
    return read(x, w, None if compute_dtype is None else jnp.dtype(compute_dtype))


def quantized_matmul_reference(
    x: Float[Array, "... d"],
    blocks: UInt8[Array, "f row_bytes"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... f"]:
    d = elements_per_row("quantized_matmul", qtype, blocks.shape[-1])
    if x.shape[-1] != d:
        raise TypeError(
            f"quantized_matmul: dim `d` is {x.shape[-1]} in `x` but {d} in `w`, a row "
            f"of {blocks.shape[-1]} bytes of {qtype}."
        )
    decode = functools.partial(decode_rows, qtype=qtype)
    return decoded_product(x, (blocks,), decode, 1, compute_dtype)


def quantized_matmul_bwd_reference(
    blocks: UInt8[Array, "f row_bytes"],
    dy: Float[Array, "... f"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    decode = functools.partial(decode_rows, qtype=qtype)
    return decoded_product(dy, (blocks,), decode, 0, compute_dtype)


quantized_matmul_p = kernel_primitive(
    quantized_matmul_reference,
    bwd=quantized_matmul_bwd_reference,
    linear=("x",),
    replicated=("d", "row_bytes"),  # blocks span d: a cut of d need not be one of bytes
)


def multiply_gguf(
    x: Float[Array, "... d"], w: GGUFTensor, compute_dtype: jnp.dtype | None
) -> Float[Array, "... f"]:
    return quantized_matmul_p(x, w.blocks, qtype=w.qtype, compute_dtype=compute_dtype)


QUANTIZED_MATMUL[GGUFTensor] = multiply_gguf
