"""What is computed with an `IntTensor`: its weights, products, rows, experts."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.decoded_products import (
    decoded_product,
    decoded_rows,
    routed_product,
    routed_product_transpose,
)
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.int_tensor import IntTensor, decode_int, int_width
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL
from jaxkern.primitives.quant.quantized_matmul_id import QUANTIZED_MATMUL_ID


def dequantize_int(w: IntTensor, dtype: jnp.dtype) -> Float[Array, "... d"]:
    y = dequantize_int_p(*arrays_of(w), **layout_of(w), dtype=dtype)
    if w.order is None:
        return y
    return jnp.take_along_axis(y, jnp.argsort(w.order)[..., None, :], axis=-1)


def int_matmul(
    x: Float[Array, "... d"], w: IntTensor, compute_dtype: jnp.dtype | None
) -> Float[Array, "... f"]:
    if w.order is not None:
        x = jnp.take(x, w.order, axis=-1)
    return int_matmul_p(x, *arrays_of(w), **layout_of(w), compute_dtype=compute_dtype)


def int_embedding(
    ids: Integer[Array, "..."], w: IntTensor, dtype: jnp.dtype
) -> Float[Array, "... d"]:
    y = int_embedding_p(ids, *arrays_of(w), **layout_of(w), dtype=dtype)
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
    return int_matmul_id_p(
        x, ids, *arrays_of(w), **layout_of(w), compute_dtype=compute_dtype
    )


def arrays_of(w: IntTensor) -> tuple[Array, Array, Array | None]:
    return w.codes, w.scales, w.zeros


def layout_of(w: IntTensor) -> dict[str, int | bool]:
    return {"bits": w.bits, "group_size": w.group_size, "signed": w.signed}


def dequantize_int_reference(
    codes: Integer[Array, "... bytes"],
    scales: Float[Array, "... groups"],
    zeros: Float[Array, "... groups"] | None,
    *,
    bits: int,
    group_size: int,
    signed: bool,
    dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    layout = {"bits": bits, "group_size": group_size, "signed": signed}
    int_width("dequantize_int", codes, scales, **layout)
    return decode_int(codes, scales, zeros, **layout, dtype=dtype)


def int_matmul_reference(
    x: Float[Array, "... d"],
    codes: Integer[Array, "f bytes"],
    scales: Float[Array, "f groups"],
    zeros: Float[Array, "f groups"] | None,
    *,
    bits: int,
    group_size: int,
    signed: bool,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... f"]:
    layout = {"bits": bits, "group_size": group_size, "signed": signed}
    _check_width("int_matmul", x, codes, scales, layout)
    arrays, decode = _operands(codes, scales, zeros, layout)
    return decoded_product(x, arrays, decode, 1, compute_dtype)


def int_matmul_bwd_reference(
    codes: Integer[Array, "f bytes"],
    scales: Float[Array, "f groups"],
    zeros: Float[Array, "f groups"] | None,
    dy: Float[Array, "... f"],
    *,
    bits: int,
    group_size: int,
    signed: bool,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    layout = {"bits": bits, "group_size": group_size, "signed": signed}
    arrays, decode = _operands(codes, scales, zeros, layout)
    return decoded_product(dy, arrays, decode, 0, compute_dtype)


def int_embedding_reference(
    ids: Integer[Array, "..."],
    codes: Integer[Array, "v bytes"],
    scales: Float[Array, "v groups"],
    zeros: Float[Array, "v groups"] | None,
    *,
    bits: int,
    group_size: int,
    signed: bool,
    dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    layout = {"bits": bits, "group_size": group_size, "signed": signed}
    int_width("int_embedding", codes, scales, **layout)
    arrays, decode = _operands(codes, scales, zeros, layout)
    return decoded_rows(ids, arrays, decode, dtype)


def int_matmul_id_reference(
    x: Float[Array, "... d"],
    ids: Integer[Array, "... k"],
    codes: Integer[Array, "e f bytes"],
    scales: Float[Array, "e f groups"],
    zeros: Float[Array, "e f groups"] | None,
    *,
    bits: int,
    group_size: int,
    signed: bool,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... k f"]:
    layout = {"bits": bits, "group_size": group_size, "signed": signed}
    _check_width("int_matmul_id", x, codes, scales, layout)
    arrays, decode = _operands(codes, scales, zeros, layout)
    return routed_product(x, ids, arrays, decode, compute_dtype)


def int_matmul_id_bwd_reference(
    ids: Integer[Array, "... k"],
    codes: Integer[Array, "e f bytes"],
    scales: Float[Array, "e f groups"],
    zeros: Float[Array, "e f groups"] | None,
    dy: Float[Array, "... k f"],
    *,
    bits: int,
    group_size: int,
    signed: bool,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    layout = {"bits": bits, "group_size": group_size, "signed": signed}
    arrays, decode = _operands(codes, scales, zeros, layout)
    return routed_product_transpose(dy, ids, arrays, decode, compute_dtype)


def _operands(codes, scales, zeros, layout: dict):
    """The arrays that are there, and how they decode."""
    arrays = (codes, scales) if zeros is None else (codes, scales, zeros)
    return arrays, functools.partial(decode_int, **layout)


def _check_width(op: str, x, codes, scales, layout: dict) -> None:
    d = int_width(op, codes, scales, **layout)
    if x.shape[-1] != d:
        raise TypeError(f"{op}: dim `d` is {x.shape[-1]} in `x` but {d} in `w`.")


WHOLE = ("d", "bytes", "groups")  # a group spans all three

dequantize_int_p = kernel_primitive(dequantize_int_reference, replicated=WHOLE)
int_matmul_p = kernel_primitive(
    int_matmul_reference,
    bwd=int_matmul_bwd_reference,
    linear=("x",),
    replicated=WHOLE,
)
int_embedding_p = kernel_primitive(
    int_embedding_reference,
    replicated=("v", *WHOLE),  # an id may name any row
)
int_matmul_id_p = kernel_primitive(
    int_matmul_id_reference,
    bwd=int_matmul_id_bwd_reference,
    linear=("x",),
    replicated=("e", "k", *WHOLE),  # an id may name any expert
)

DEQUANTIZE[IntTensor] = dequantize_int
QUANTIZED_MATMUL[IntTensor] = int_matmul
QUANTIZED_EMBEDDING[IntTensor] = int_embedding
QUANTIZED_MATMUL_ID[IntTensor] = int_matmul_id
