"""Product of rows with the quantised experts they name: y[r] = w[ids[r]] x[r // k]."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.dense_product import result_dtype
from jaxkern.primitives.quant.gguf_tensor import GGUF, GGUFTensor
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor, reader_of

QUANTIZED_MATMUL_ID: dict[type, Callable] = {}  # (x, ids, w, compute_dtype) -> [t k f]


@check_arguments
def quantized_matmul_id(
    x: Float[Array, "t d"],
    w: QuantizedTensor,
    ids: Integer[Array, " rows"],
    *,
    top_k: int = 1,
    compute_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "rows f"]:
    """The experts of a mixture on the rows routed to them, decoded on the way.

        y[r, f] = sum_d x[r // top_k, d] * w[ids[r], f, d]

    An id outside [0, e) gives zeros. Row r is slot r % top_k of token r // top_k: pass
    the `[t, top_k]` ids of a router flattened. With up to e rows only the named experts
    are decoded; with more, each expert once. Sums, roundings and gradients are those of
    `quantized_matmul`.

    Args:
      x: `[t, d]`, any float dtype.
      w: `[e, f, d]`, any container.
      ids: `[t * top_k]`, any integer dtype.
      top_k: rows of each token.
      compute_dtype, preferred_element_type: as in `quantized_matmul`; of an `FP8Tensor`
        float8_e4m3fn is `grouped_matmul_fp8` of the sorted rows.

    Returns:
      y: `[t * top_k, f]`, dtype of x unless another is preferred.

    Raises:
      TypeError: `w` is no quantised tensor `[e, f, d]`, or shapes do not fit.

    Example:
      >>> experts = jnp.array([1.0, 10.0]).reshape(2, 1, 1) * jnp.ones((2, 1, 32))
      >>> w, x = jaxkern.quantize_gguf(experts, "Q8_0"), jnp.ones((1, 32))
      >>> jaxkern.quantized_matmul_id(x, w, jnp.array([1, 0]), top_k=2)[:, 0]
      Array([319.98 ,  31.998], dtype=float32)
    """
    read = reader_of("quantized_matmul_id", QUANTIZED_MATMUL_ID, w, ndim=3)
    if x.ndim != 2 or ids.shape != (x.shape[0] * top_k,):
        raise TypeError(
            "quantized_matmul_id: `x` must be [t, d] and `ids` [t * top_k], got "
            f"{x.shape} and {ids.shape} with top_k={top_k}."
        )
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    result = result_dtype("quantized_matmul_id", preferred_element_type, x.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, result))  # y is rounded to its dtype
    y = read(wide, ids.reshape(x.shape[0], top_k), w, dtype)
    return y.reshape(x.shape[0] * top_k, y.shape[-1]).astype(result)


quantized_matmul_id_p = GGUF.matmul_id("quantized_matmul_id", __name__)
QUANTIZED_MATMUL_ID[GGUFTensor] = GGUF.reader(quantized_matmul_id_p, "compute_dtype")
