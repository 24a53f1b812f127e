"""Linear layer: y = x w^T + bias, for dense and for quantised weights."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.dense_product import product, result_dtype
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.linear.linear_fp8 import linear_fp8
from jaxkern.primitives.linear.policy import Policy, current_policy
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

FP8 = jnp.dtype(jnp.float8_e4m3fn)
NARROW = (jnp.bfloat16, jnp.float16)  # weights that a kernel may read as they are


@check_arguments
def linear(
    x: Float[Array, "... d"],
    w: Float[Array, "f d"] | QuantizedTensor,
    bias: Float[Array, " f"] | None = None,
    *,
    compute_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "... f"]:
    """Matrix product with a weight stored output-major, as checkpoints store it.

        y[..., f] = sum_d x[..., d] * w[f, d] + bias[f]

    Sums in float32 (float64 for float64 operands). The dense product is
    `lax.dot_general` at the precision of `jax.default_matmul_precision`, rounded once,
    after the bias; so are the products of the gradient, but where d is cut over devices
    each rounds its share of a product of bfloat16. A quantised tensor goes to
    `quantized_matmul`, whose result has x.dtype already when the bias is added. In a
    `policy` block the operands are rounded to the policy's compute dtype and the result
    has its output dtype.

    With float8_e4m3fn all three products of a training step are of 8-bit floats:

        y = q(x) q(w)^T + bias,    dx = r(dy) q(w),    dw = r(dy)^T q(x)

    q rounds to e4m3fn and r to e5m2, each with one scale for the whole tensor: the
    least power of two with which its own largest element is in range. Of an x or w that
    is cut over devices that is the largest on all of them, of a `vmap` that of each
    example; inside `shard_map` each device has its own. Zeros have scale 1; an infinity
    or a NaN anywhere makes all of a product NaN. Rounding is straight-through: jvp and
    derivatives of higher order are those of the product of q(x) and q(w) where q has
    derivative 1, and each reverse pass through it rounds its cotangent by r.
    `jax.checkpoint` may keep q(x) and q(w), 8 bits an element, by the name
    "linear_fp8_fwd". XLA multiplies bfloat16 operands in fp8 on GPUs of compute
    capability 8.9 and higher; elsewhere the products are wider, of the same numbers.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[f, d]`, an array of any float dtype or a quantised tensor.
      bias: `[f]`, or None.
      compute_dtype: dtype to which the operands are rounded before the product, such as
        bfloat16 or float8_e4m3fn; None for their own. It goes before a policy's. For
        quantised tensors see `quantized_matmul`.
      preferred_element_type: dtype of the result, to which the sums are rounded: with
        float32 and operands of 16 bits, the sums themselves. It goes before a policy's.

    Returns:
      y: `[..., f]`, dtype of x unless it is preferred or a policy names another.

    Raises:
      TypeError: `w` or `bias` does not fit, or no float is preferred.
      ValueError: no such compute dtype: another one of 8 bits, or float8_e4m3fn of a
        quantised tensor.

    Example:
      >>> x, w = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
      >>> jaxkern.linear(x, w).shape
      (2, 3)
      >>> jaxkern.linear(x, w, preferred_element_type=jnp.float32).dtype
      dtype('float32')
      >>> jaxkern.linear(x, 1.1 * w, compute_dtype="float8_e4m3fn")[0]  # 4 times 1.125
      Array([4.5, 4.5, 4.5], dtype=bfloat16)
    """
    chosen = current_policy()
    default = x.dtype if chosen is None else chosen.output or x.dtype
    result = result_dtype("linear", preferred_element_type, default)
    dense = isinstance(w, jax.Array | np.ndarray)
    compute = chosen and chosen.compute
    if compute_dtype is not None:
        compute = _checked(jnp.dtype(compute_dtype), dense)
    if isinstance(w, jax.Array | np.ndarray):
        unrounded = result if bias is None else None
        y = _dense_product(x, w, compute, chosen, unrounded)
    else:
        wide = jnp.promote_types(x.dtype, result)  # rounded to result behind the bias
        y = quantized_matmul(x, w, compute_dtype=compute, preferred_element_type=wide)
    if bias is None:
        return y.astype(result)
    if bias.shape != y.shape[-1:]:
        raise TypeError(
            f"linear: `bias` must have shape {y.shape[-1:]}, got {bias.shape}."
        )
    return (at_least_f32(y) + bias).astype(result)


def _checked(compute: jnp.dtype, dense: bool) -> jnp.dtype:
    """The compute dtype that was asked for."""
    known = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
    if not dense:
        if compute not in (*known, jnp.int8):
            raise ValueError(
                "linear: `compute_dtype` of a quantised tensor must be int8 or a float "
                f"of at least 16 bits, got {compute.name}; float8_e4m3fn takes arrays."
            )
    elif compute not in (*known, FP8):
        raise ValueError(
            "linear: `compute_dtype` must be float8_e4m3fn or a float of at least 16 "
            f"bits, got {compute.name}. 8-bit products have one scale a tensor, e4m3fn "
            "operands and e5m2 cotangents; scales of blocks have no product here."
        )
    return compute


def _dense_product(
    x: Float[Array, "... d"],
    w: Float[Array | np.ndarray, "f d"],
    compute_dtype: jnp.dtype | None,
    chosen: Policy | None,
    result: jnp.dtype | None,
) -> Float[Array, "... f"]:
    """The product in float32, or a policy's sums, not yet rounded.

    Of bfloat16 alone it is in bfloat16 where that is the `result`: XLA adds in float32
    and rounds once, and so do the products of the gradient. Rounded outside, these
    would multiply cotangents of float32, on a GPU at half the rate.
    """
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise TypeError(
            f"linear: `x` must be [..., d] and `w` [f, d], got {x.shape} and {w.shape}."
        )
    if compute_dtype == FP8:
        wide = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
        return linear_fp8(x, jnp.asarray(w), result or wide)
    precision = chosen and chosen.precision
    accum = jnp.float32 if chosen is None else chosen.accum
    if w.dtype in NARROW and accum == jnp.float32:
        narrow = x.dtype == w.dtype == result == jnp.bfloat16
        dtype = jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)
        options = dict(compute_dtype=compute_dtype, precision=precision)
        return linear_p(x, w, preferred_element_type=dtype, **options)
    return product(x, w, compute_dtype, precision, accum)


def linear_reference(
    x: Float[Array, "... d"],
    w: Float[Array, "f d"],
    *,
    compute_dtype: jnp.dtype | None,
    precision: lax.Precision | None,
    preferred_element_type: jnp.dtype,
) -> Float[Array, "... f"]:
    y = product(x, w, compute_dtype, precision, preferred_element_type)
    return y.astype(preferred_element_type)


linear_p = kernel_primitive(linear_reference)
