"""What is computed with an `IntTensor`: its weights, products, rows, experts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.int_tensor import IntTensor, decode_int, int_width
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_family import QuantizedFamily
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL
from jaxkern.primitives.quant.quantized_matmul_id import QUANTIZED_MATMUL_ID

INT = QuantizedFamily(
    arrays={
        "codes": Integer[Array, "f bytes"],
        "scales": Float[Array, "f groups"],
        "zeros": Float[Array, "f groups"],
    },
    optional=("zeros",),
    layout=("bits", "group_size", "signed"),
    decode=decode_int,
    width=lambda op, codes, scales, _, **layout: int_width(op, codes, scales, **layout),
    whole=("d", "bytes", "groups"),  # a group spans all three
)
dequantize_int_p = INT.dequantize("dequantize_int", __name__)
int_matmul_p = INT.matmul("int_matmul", __name__)
int_embedding_p = INT.embedding("int_embedding", __name__)
int_matmul_id_p = INT.matmul_id("int_matmul_id", __name__)


# With an `order` the columns of the codes are inputs order[0], order[1] ...


def dequantize_int(w: IntTensor, dtype: jnp.dtype) -> Float[Array, "... d"]:
    y = INT.reader(dequantize_int_p, "dtype")(w, dtype)
    if w.order is None:
        return y
    return jnp.take_along_axis(y, jnp.argsort(w.order)[..., None, :], axis=-1)


def int_matmul(
    x: Float[Array, "... d"], w: IntTensor, compute_dtype: jnp.dtype | None
) -> Float[Array, "... f"]:
    if w.order is not None:
        x = jnp.take(x, w.order, axis=-1)
    return INT.reader(int_matmul_p, "compute_dtype")(x, w, compute_dtype)


def int_embedding(
    ids: Integer[Array, "..."], w: IntTensor, dtype: jnp.dtype
) -> Float[Array, "... d"]:
    y = INT.reader(int_embedding_p, "dtype")(ids, w, dtype)
    return y if w.order is None else jnp.take(y, jnp.argsort(w.order), axis=-1)


def int_matmul_id(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    w: IntTensor,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "t k f"]:
    if w.order is not None:
        raise TypeError(
            "quantized_matmul_id: experts with `order` each need their own x. Use "
            "requantize(w, ...) first."
        )
    return INT.reader(int_matmul_id_p, "compute_dtype")(x, ids, w, compute_dtype)


DEQUANTIZE[IntTensor] = dequantize_int
QUANTIZED_MATMUL[IntTensor] = int_matmul
QUANTIZED_EMBEDDING[IntTensor] = int_embedding
QUANTIZED_MATMUL_ID[IntTensor] = int_matmul_id
