"""Product of 8-bit activations and 8-bit weights, summed in int32.

y[..., f] = x_scale * scale[f] * sum_d x_code[..., d] * code[f, d]
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.quant.int_matmul import int_matmul
from jaxkern.primitives.quant.int_tensor import IntTensor, quantize_int


@check_arguments
def int8_matmul(
    x: Float[Array, "... d"],
    w: IntTensor,
    column_scales: Float[Array, " d"] | None = None,
    *,
    x_scale: Literal["row", "tensor"] = "row",
) -> Float[Array, "... f"]:
    """Rounds `x` to 8 bits, then multiplies integers with integers.

        y[..., f] = x_scale * scales[f] * sum_d x_codes[..., d] codes[f, d]

    The rounding is that of `quantize_int(x)`, computed anew at each call (dynamic
    quantisation). Its gradient is straight-through: with respect to `x` that of
    `quantized_matmul(x, w)`, as if nothing were rounded.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[f, d]`, as `quantize_int(w)` makes it: signed, 8 bits, one scale a row,
        no zeros, no order. One scale for the whole tensor is that scale in each row.
      column_scales: `[d]`, scales of the columns of w beside those of its rows, or
        None. They go into x before it is rounded, as SmoothQuant's
        (https://arxiv.org/abs/2211.10438); differentiable.
      x_scale: "row" gives each row of x a scale, "tensor" all of them one.

    Returns:
      y: `[..., f]`, dtype of x.

    Raises:
      TypeError: `w` is another tensor, or its `d` is not that of `x`.
      ValueError: `x_scale` is neither of the two.

    Example:
      >>> x, w = jnp.ones((2, 4)), jaxkern.quantize_int(jnp.ones((3, 4)))
      >>> jaxkern.int8_matmul(x, w)
      Array([[4., 4., 4.],
             [4., 4., 4.]], dtype=float32)
    """
    if x_scale not in ("row", "tensor"):
        raise ValueError(
            f"int8_matmul: `x_scale` must be 'row' or 'tensor', got {x_scale!r}."
        )
    by_row = isinstance(w, IntTensor) and w.ndim == 2 and w.scales.shape[-1] == 1
    if not by_row or w.codes.dtype != jnp.int8 or len(jax.tree.leaves(w)) > 2:
        raise TypeError(
            "int8_matmul: `w` must be [f, d] of quantize_int(w), signed, 8 bits, one "
            f"scale a row, got {w!r}. Use quantized_matmul."
        )
    y = x
    if column_scales is not None:
        if jnp.shape(column_scales) != x.shape[-1:]:
            raise TypeError(
                f"int8_matmul: `column_scales` must have shape {x.shape[-1:]}, got "
                f"{jnp.shape(column_scales)}."
            )
        y = at_least_f32(x) * at_least_f32(column_scales)
    return _straight_through(x_scale, y, w.codes, w.scales).astype(x.dtype)


def is_zero(tangent) -> bool:
    return isinstance(tangent, SymbolicZero)


def _rounded(x_scale, x, codes, scales):
    x32 = at_least_f32(x)
    if x_scale == "row":
        rows = quantize_int(x32)
        x_codes, x_scales = rows.codes, rows.scales
    else:
        whole = quantize_int(x32.reshape(1, -1))
        x_codes = whole.codes.reshape(x.shape)
        scale = jnp.sum(whole.scales)  # the one there is, if x has any number
        x_scales = jnp.broadcast_to(scale, (*x.shape[:-1], 1))
    y = int8_matmul_p(x_codes, x_scales, codes, scales.astype(x_scales.dtype))
    return y.astype(x.dtype)


_straight_through = functools.partial(jax.custom_jvp, nondiff_argnums=(0,))(_rounded)


def _straight_through_jvp(x_scale, primals, tangents):
    x, codes, scales = primals
    dx, _, dscales = tangents

    def product(x, scales):
        w = IntTensor(codes, scales, group_size=max(codes.shape[-1], 1))
        return int_matmul(x, w, None)

    y = _straight_through(x_scale, *primals)
    dy = jnp.zeros_like(y) if is_zero(dx) else product(dx, scales)
    if not is_zero(dscales):
        # a term that is zero, for its derivative by x: without it the mixed second
        # derivative would be 0 in one order and not in the other
        fixed = lax.stop_gradient(x)
        zero = product(x - fixed, jnp.ones_like(scales)) * dscales[:, 0]
        dy += _rounded(x_scale, fixed, codes, dscales) + zero.astype(y.dtype)
    return y, dy


_straight_through.defjvp(_straight_through_jvp, symbolic_zeros=True)


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
