"""Grouped product of rows and weights in 8-bit floats, with a scale for each row.

    y[i, n] = x_scale[i] w_scale[g, n] sum_d x8[i, d] w8[g, n, d],   i of group g

The primitive, `scaled_grouped_matmul`, has codes and scales; the operator rounds x, and
w where it is an array. Scales stand outside of the sums: https://arxiv.org/abs/2209.05433
has one for each tensor, here rows of other groups share none.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Integer, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.dense_product import result_dtype
from jaxkern.primitives.float8 import decode_float8
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.linear.encode_rows_fp8 import encode_rows_fp8_p
from jaxkern.primitives.linear.linear_fp8 import restored_dtype
from jaxkern.primitives.linear.scaled_float8 import (
    OPERANDS,
    rounded_gradient,
    standing_for,
)
from jaxkern.primitives.moe.expert_order import expert_order
from jaxkern.primitives.moe.grouped_matmul import (
    grouped_matmul_p,
    multiply_groups,
    multiply_quantized_groups,
)
from jaxkern.primitives.moe.permute_tokens import permute_tokens, take_rows
from jaxkern.primitives.moe.row_blocks import row_blocks
from jaxkern.primitives.moe.unpermute_tokens import unpermute_tokens
from jaxkern.primitives.quant.fp8 import decode_fp8
from jaxkern.primitives.quant.fp8_tensor import FP8Tensor
from jaxkern.primitives.quant.quantized_matmul_id import QUANTIZED_MATMUL_ID

WORD = 4  # codes that are gathered together


@check_arguments
def grouped_matmul_fp8(
    x: Float[Array, "r d"],
    w: Float[Array, "e f d"] | FP8Tensor,
    group_sizes: Integer[Array, " e"],
    *,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "r f"]:
    """Multiplies sorted rows by the weight of their group, both in 8-bit floats.

        y[i] = q(w[g]) q(x[i])   for the rows i of group g;  0 behind the last group

    q rounds to e4m3fn with a scale for each row, of x and of each weight: the least
    power of two with which the row's largest element is in range. Zeros have scale 1;
    an infinity or a NaN makes NaN of what its own row gives. An `FP8Tensor` is taken as
    it is stored, so that only x is rounded: prompts of a mixture whose experts are kept
    in 8 bits. Sums are in float32, scaled at their end and rounded once.

    The gradient of w in float32 or 16 bits is that of `linear` in float8_e4m3fn: dx =
    r(dy) q(w) and dw = r(dy)^T q(x), where r rounds each row to e5m2 and both products
    are those of `grouped_matmul`. Rounding is straight-through: jvp and derivatives of
    higher order are those of the product where q has derivative 1. Weights that are
    stored have no gradient, and that of x is dx = dy w in its dtype, not rounded.

    On Hopper the product is a kernel of 1.7 to 1.9 times the rate of bfloat16, and one
    before it rounds x; to round w too, in each call, costs more than is gained. Tensor
    cores there keep 13 binary digits of a sum every 32 columns, an error of 3.5e-3 of
    the largest result 2880 columns deep. Elsewhere XLA adds the same products in
    float32, in a loop over blocks of rows.

    Args:
      x: `[r, d]`, any float dtype.
      w: `[e, f, d]`, an array of any float dtype, or an `FP8Tensor` in e4m3fn whose
        scales are of whole rows: `block=(1, 0)`, or `(0, 0)` for one a weight.
      group_sizes: `[e]`, any integer dtype, not negative; as in `grouped_matmul`.
      preferred_element_type: dtype of y, to which the sums are rounded.

    Returns:
      y: `[r, f]`, dtype of x unless another is preferred.

    Raises:
      TypeError: a dim differs between operands, or no float is preferred.
      ValueError: `w` is stored in another format, or with scales along d.

    Example:
      >>> x, sizes = 1.1 * jnp.ones((4, 2)), jnp.array([1, 2])  # the last has no group
      >>> w = jnp.array([1.0, 10.0]).reshape(2, 1, 1) * jnp.ones((2, 1, 2))
      >>> jaxkern.grouped_matmul_fp8(x, w, sizes)[:, 0]  # 1.1 is 1.125 in e4m3fn
      Array([ 2.25, 22.5 , 22.5 ,  0.  ], dtype=float32)
    """
    result = result_dtype("grouped_matmul_fp8", preferred_element_type, x.dtype)
    if isinstance(w, FP8Tensor):
        check_stored(x, w, group_sizes)
        rows = encoded_rows(x), stored_rows(w), group_sizes
        return stored_product(as_it_is, result, (x,), *rows)
    w = jnp.asarray(w)
    y = product_of_rows(x, w, encoded_rows(x), encoded_rows(w), group_sizes, result)
    return rounded_gradient(y, num_maps=1)


class Rows(NamedTuple):
    """A matrix, or several, in e4m3fn with a scale for each row."""

    codes: UInt8[Array, "... r d"]
    scales: Float[Array, "... r"]


def encoded_rows(x: Float[Array, "... r d"]) -> Rows:
    """Each row rounded by a scale of its own; constants of differentiation."""
    return Rows(*encode_rows_fp8_p(lax.stop_gradient(x)))


def each_row(f, ndim: int):
    for _ in range(ndim - 1):
        f = jax.vmap(f)
    return f


def check_stored(x: Array, w: FP8Tensor, group_sizes: Array) -> None:
    op = "grouped_matmul_fp8"
    if w.ndim != 3 or group_sizes.shape != w.shape[:1]:
        raise TypeError(
            f"{op}: `w` must be [e, f, d] with a size of each group, got {w.shape} and "
            f"`group_sizes` {group_sizes.shape}."
        )
    if x.shape[1] != w.shape[2]:
        raise TypeError(
            f"{op}: `x` must be [r, {w.shape[2]}] as `w` is {w.shape}, got {x.shape}."
        )
    check_rows(op, "w", w)


def check_rows(op: str, name: str, w: FP8Tensor) -> None:
    """ValueError unless the kernel reads the weights as they are stored."""
    if w.format != OPERANDS:
        raise ValueError(
            f"{op}: `{name}` must be stored in {OPERANDS}, got {w.format!r}."
        )
    if w.scales.shape[-1] != 1:
        raise ValueError(
            f"{op}: `{name}` must have scales of whole rows, block=(1, 0) or (0, 0), "
            f"got {w.block}: those of blocks along a row would stand within the sums. "
            "`grouped_matmul`, which decodes, takes them."
        )


def stored_rows(w: FP8Tensor) -> Rows:
    e, f, _ = w.shape
    scales = lax.stop_gradient(w.scales[..., 0]).astype(jnp.float32)
    if scales.shape != (e, f):
        scales = jnp.repeat(scales, w.block[0] or f, axis=1)[:, :f]
    return Rows(jnp.asarray(w.codes), scales)


# y of the codes. Its derivative is that of x and w, whose values it does not read.
@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def product_of_rows(
    x: Float[Array, "r d"],
    w: Float[Array, "e f d"],
    x_rows: Rows,
    w_rows: Rows,
    group_sizes: Integer[Array, " e"],
    result: jnp.dtype,
) -> Float[Array, "r f"]:
    operands = *x_rows, *w_rows, group_sizes
    return scaled_grouped_matmul_p(*operands, preferred_element_type=result)


@product_of_rows.defjvp
def _(result, primals, tangents):
    x, w, x_rows, w_rows, group_sizes = primals
    # decoded anew in the backward pass: until then the codes are what is kept
    slope = functools.partial(slope_of_rows, result=result)
    slope = jax.checkpoint(slope, prevent_cse=False)
    y = product_of_rows(*primals, result)
    return y, slope(tangents[:2], (x, w), x_rows, w_rows, group_sizes)


def slope_of_rows(tangents, floats, x_rows, w_rows, group_sizes, *, result):
    """The tangent of the product of what is decoded, by that of `grouped_matmul`."""
    (x, w), (x_dot, w_dot) = floats, tangents
    dtype = restored_dtype(x, w)
    other = None if result == dtype else result

    def decoded(x, codes, scale):
        return standing_for(x, codes, scale, OPERANDS, dtype)

    def product(*operands):
        return grouped_matmul_p(*operands, group_sizes, preferred_element_type=other)

    x8 = each_row(decoded, x.ndim)(x, *x_rows)
    w8 = each_row(decoded, w.ndim)(w, *w_rows)
    moves = x_dot.astype(dtype), w_dot.astype(dtype)
    return jax.jvp(product, (x8, w8), moves)[1]


# y of the codes. Its derivative is that of `rows_of(*floats)` times the weights, whose
# values it does not read.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def stored_product(
    rows_of: Callable[..., Float[Array, "r d"]],
    result: jnp.dtype,
    floats: tuple[Any, ...],
    x_rows: Rows,
    w_rows: Rows,
    group_sizes: Integer[Array, " e"],
) -> Float[Array, "r f"]:
    del rows_of, floats
    operands = *x_rows, *w_rows, group_sizes
    return scaled_grouped_matmul_p(*operands, preferred_element_type=result)


@stored_product.defjvp
def _(rows_of, result, primals, tangents):
    floats, _, w_rows, group_sizes = primals
    x_dot = jax.jvp(rows_of, floats, tangents[0])[1]
    # decoded anew in the backward pass: until then the codes are what is kept
    slope = functools.partial(slope_of_stored, result=result)
    slope = jax.checkpoint(slope, prevent_cse=False)
    y = stored_product(rows_of, result, *primals)
    return y, slope(x_dot, w_rows, group_sizes)


def slope_of_stored(
    x_dot: Float[Array, "r d"],
    w_rows: Rows,
    group_sizes: Integer[Array, " e"],
    *,
    result: jnp.dtype,
) -> Float[Array, "r f"]:
    """The tangent where the weights are stored, which have none: x_dot w^T."""
    dtype = restored_dtype(x_dot, x_dot)
    other = None if result == dtype else result
    scales = w_rows.scales[..., None]
    w8 = decode_fp8(w_rows.codes, scales, format=OPERANDS, dtype=dtype)

    def product(x):
        return grouped_matmul_p(x, w8, group_sizes, preferred_element_type=other)

    move = x_dot.astype(dtype)
    return jax.jvp(product, (jnp.zeros_like(move),), (move,))[1]


def as_it_is(x: Float[Array, "r d"]) -> Float[Array, "r d"]:
    return x


def slots_of_tokens(
    x: Float[Array, "t d"], order: Int32[Array, " r"], *, k: int
) -> Float[Array, "r d"]:
    return permute_tokens(x, order, k)


def permuted(rows: Rows, index: Int32[Array, " r"]) -> Rows:
    """Rows by their numbers, which are all within bounds."""
    codes, (t, d) = rows.codes, rows.codes.shape
    whole = jax.typeof(codes).sharding.spec[1] is None  # not cut by an explicit mesh
    if d % WORD == 0 and whole:  # XLA gathers bytes one by one
        words = codes.reshape(t, d // WORD, WORD)
        words = take_rows(lax.bitcast_convert_type(words, jnp.uint32), index)
        codes = lax.bitcast_convert_type(words, jnp.uint8).reshape(len(index), d)
    else:
        codes = take_rows(codes, index)
    return Rows(codes, take_rows(rows.scales[:, None], index)[:, 0])


def scaled_grouped_matmul_reference(
    x: UInt8[Array, "r d"],
    x_scale: Float[Array, " r"],
    w: UInt8[Array, "e f d"],
    w_scale: Float[Array, "e f"],
    group_sizes: Integer[Array, " e"],
    *,
    preferred_element_type: jnp.dtype,
) -> Float[Array, "r f"]:
    """Of codes in e4m3fn, which bfloat16 holds. Scales are not differentiated."""
    x_scale, w_scale = (lax.stop_gradient(scale) for scale in (x_scale, w_scale))
    wide = np.float64 in (x_scale.dtype, w_scale.dtype, preferred_element_type)
    dtype = jnp.float64 if wide else jnp.bfloat16
    x, w = (decode_float8(codes, OPERANDS).astype(dtype) for codes in (x, w))
    sums = multiply_groups(x, w, group_sizes, contract=1)
    if x.shape[0] and w.shape[0]:
        blocks = row_blocks(group_sizes, x.shape[0])
        sums = sums * at_least_f32(x_scale)[:, None]  # both at once could underflow
        sums = sums * take_rows(at_least_f32(w_scale), blocks.group_of_row)
        sums = jnp.where(blocks.grouped[:, None], sums, 0)
    return sums.astype(preferred_element_type)


scaled_grouped_matmul_p = kernel_primitive(
    scaled_grouped_matmul_reference,
    replicated=("r", "e"),  # a group's rows may lie anywhere
)


def multiply_routed_fp8(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    w: FP8Tensor,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "t k f"]:
    """`quantized_matmul_id`: the format has no primitive that reads experts by id."""
    k = ids.shape[1]
    order, group_sizes = expert_order(ids, w.shape[0])
    if compute_dtype == jnp.float8_e4m3fn:
        check_rows("quantized_matmul_id", "w", w)
        slots = functools.partial(slots_of_tokens, k=k)
        rows = permuted(encoded_rows(x), order // k), stored_rows(w), group_sizes
        y = stored_product(slots, x.dtype, (x, order), *rows)
    else:
        rows = permute_tokens(x, order, k)
        y = multiply_quantized_groups(rows, w, group_sizes, compute_dtype)
    return unpermute_tokens(y, order, k)


QUANTIZED_MATMUL_ID[FP8Tensor] = multiply_routed_fp8
