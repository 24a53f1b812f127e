"""Rows of a quantised table: y = w[ids], only these rows are decoded; here GGUF."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.decoded_products import decoded_rows
from jaxkern.primitives.quant.gguf_blocks import decode_rows, elements_per_row
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
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
    """
    read = reader_of("quantized_embedding", QUANTIZED_EMBEDDING, w, ndim=2)
    return read(ids, w, float_dtype("quantized_embedding", dtype))


def quantized_embedding_reference(
    ids: Integer[Array, "..."],
    blocks: UInt8[Array, "v row_bytes"],
    *,
    qtype: str,
    dtype: jnp.dtype,
) -> Float[Array, "... d"]:
    elements_per_row("quantized_embedding", qtype, blocks.shape[-1])
    decode = functools.partial(decode_rows, qtype=qtype)
    return decoded_rows(ids, (blocks,), decode, dtype)


quantized_embedding_p = kernel_primitive(
    quantized_embedding_reference,
    replicated=("v", "row_bytes", "d"),  # an id may name any row
)


def look_up_gguf(
    ids: Integer[Array, "..."], w: GGUFTensor, dtype: jnp.dtype
) -> Float[Array, "... d"]:
    return quantized_embedding_p(ids, w.blocks, qtype=w.qtype, dtype=dtype)


QUANTIZED_EMBEDDING[GGUFTensor] = look_up_gguf
