"""Product of 8-bit activations and 8-bit weights, summed in int32.

y[..., f] = x_scale * scale[f] * sum_d x_code[..., d] * code[f, d]
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8

from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.quant.int_matmul import int_matmul
from jaxkern.primitives.quant.int_tensor import IntTensor, quantize_int


def int8_matmul(x: Float[Array, "... d"], w: IntTensor) -> Float[Array, "... f"]:
    """Rounds each row of `x` to 8 bits, then multiplies integers with integers.

    The rounding is that of `quantize_int(x)`, one scale for each row, computed anew at
    each call (dynamic quantisation). Its gradient is straight-through: with respect to
    `x` that of `quantized_matmul(x, w)`, as if nothing were rounded.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[f, d]`, as `quantize_int(w)` makes it: signed, 8 bits, one scale a row,
        no zeros, no order.

    Returns:
      y: `[..., f]`, dtype of x.

    Raises:
      TypeError: `w` is another tensor, or its `d` is not that of `x`.
    """
    by_row = isinstance(w, IntTensor) and w.ndim == 2 and w.scales.shape[-1] == 1
    if not by_row or w.codes.dtype != jnp.int8 or len(jax.tree.leaves(w)) > 2:
        raise TypeError(
            "int8_matmul: `w` must be [f, d] of quantize_int(w), signed, 8 bits, one "
            f"scale a row, got {w!r}. Use quantized_matmul."
        )
    return _straight_through(x, w.codes, w.scales)


def _rounded(x, codes, scales):
    rows = quantize_int(at_least_f32(x))
    y = int8_matmul_p(rows.codes, rows.scales, codes, scales.astype(rows.scales.dtype))
    return y.astype(x.dtype)


_straight_through = jax.custom_jvp(_rounded)


@_straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    x, codes, scales = primals
    dx, _, dscales = tangents
    w = IntTensor(codes, scales, group_size=max(codes.shape[-1], 1))
    dy = int_matmul(dx, w, None) + _rounded(x, codes, dscales)
    return _straight_through(*primals), dy


def int8_matmul_reference(
    x_codes: Int8[Array, "... d"],
    x_scales: Float[Array, "... 1"],
    codes: Int8[Array, "f d"],
    scales: Float[Array, "f 1"],
) -> Float[Array, "... f"]:
    y = _integer_product(x_codes, codes, x_scales)
    return (y * at_least_f32(scales)[:, 0]).astype(x_scales.dtype)


def int8_matmul_bwd_reference(
    x_codes: Int8[Array, "... d"],
    x_scales: Float[Array, "... 1"],
    codes: Int8[Array, "f d"],
    dy: Float[Array, "... f"],
) -> Float[Array, "f 1"]:
    each = _integer_product(x_codes, codes, x_scales) * at_least_f32(dy)
    total = jnp.sum(each, axis=tuple(range(each.ndim - 1)))
    return total[:, None].astype(x_scales.dtype)


def _integer_product(x_codes, codes, x_scales) -> Float[Array, "... f"]:
    """x_scale * sum_d x_code * code; exact in int32 for any d below 2**17."""
    total = lax.dot_general(
        x_codes,
        codes,
        (((x_codes.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    x_scales = at_least_f32(x_scales)
    return total.astype(x_scales.dtype) * x_scales


int8_matmul_p = kernel_primitive(
    int8_matmul_reference,
    bwd=int8_matmul_bwd_reference,
    linear=("scales",),  # in the dtype of x_scales
    replicated=("d",),
)
