"""Rows of a quantised table: y = w[ids], only these rows are decoded; here GGUF."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.quant.gguf_tensor import GGUF, GGUFTensor
from jaxkern.primitives.quant.quantized_tensor import (
    QuantizedTensor,
    float_dtype,
    reader_of,
)

QUANTIZED_EMBEDDING: dict[type, Callable] = {}  # (ids, w, dtype) -> [..., d]


@check_arguments
def quantized_embedding(
    ids: Integer[Array, "..."], w: QuantizedTensor, *, dtype: DTypeLike = jnp.float32
) -> Float[Array, "... d"]:
    """Looks up rows of a quantised table.

        y[..., :] = w[ids[...], :], or 0 where ids is negative or >= v

    The bytes of the rows are gathered first and decoded after, so the cost does not
    depend on `v`.

    Args:
      ids: `[...]`, any integer dtype.
      w: `[v, d]`, any container.
      dtype: float dtype of the result.

    Returns:
      y: `[..., d]`, `dtype`.

    Raises:
      TypeError: `w` is no quantised tensor `[v, d]`, `ids` are no integers, or `dtype`
        is not a float.

    Example:
      >>> table = jaxkern.quantize_gguf(jnp.arange(64.0).reshape(2, 32), "Q8_0")
      >>> jaxkern.quantized_embedding(jnp.array([0, 1, 7]), table)[:, 0]
      Array([ 0.   , 32.246,  0.   ], dtype=float32)
    """
    read = reader_of("quantized_embedding", QUANTIZED_EMBEDDING, w, ndim=2)
    return read(ids, w, float_dtype("quantized_embedding", dtype))


quantized_embedding_p = GGUF.embedding("quantized_embedding", __name__)
QUANTIZED_EMBEDDING[GGUFTensor] = GGUF.reader(quantized_embedding_p, "dtype")
