"""y = x8 w8^T, where x8 and w8 are x and w rounded to e4m3fn with a scale each.

    y = x8 w8^T,    dx = dy8 w8,    dw = dy8^T x8

https://arxiv.org/abs/2209.05433. On GPUs of compute capability 8.9 and higher XLA finds
the products of codes times scale and makes them in fp8; elsewhere they are products of
bfloat16, or of float32, with the same operands. A GPU multiplies 8 bits along rows
alone, so the backward pass keeps x8 and w8 transposed.

Tensor cores of 9.0 keep fewer digits of a sum of such products than float32 has: an
H200 is off by up to 7e-4 of y, by 1e-4 at the matmul precision "highest".
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.dense_product import product
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.linear.encode_fp8 import encode_fp8_p
from jaxkern.primitives.linear.scaled_float8 import (
    GRADIENTS,
    OPERANDS,
    rounded,
    rounded_gradient,
    scale_of,
    standing_for,
)


def linear_fp8(
    x: Float[Array, "... d"], w: Float[Array, "f d"], preferred_element_type: jnp.dtype
) -> Float[Array, "... f"]:
    """The product of the rounded operands; its cotangent is rounded to e5m2."""
    *lead, d = x.shape
    if len(lead) != 2:  # these two are not joined: each may be cut over devices
        x = x.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, d)
    y = linear_fp8_p(x, w, preferred_element_type=preferred_element_type)
    return y if len(lead) == 2 else y.reshape(*lead, w.shape[0])


def linear_fp8_reference(
    x: Float[Array, "b t d"],
    w: Float[Array, "f d"],
    *,
    preferred_element_type: jnp.dtype,
) -> Float[Array, "b t f"]:
    dtype = restored_dtype(x, w)
    x8, w8 = (rounded(a.astype(dtype), OPERANDS) for a in (x, w))
    y = product(x8, w8, None, None, preferred_element_type)
    return rounded_gradient(y.astype(preferred_element_type))


def linear_fp8_fwd_reference(
    x: Float[Array, "b t d"],
    w: Float[Array, "f d"],
    *,
    preferred_element_type: jnp.dtype,
) -> tuple[
    Float[Array, "b t f"],
    UInt8[Array, "d b t"],
    Float[Array, ""],
    UInt8[Array, "d f"],
    Float[Array, ""],
]:
    dtype = restored_dtype(x, w)
    x_scale, x_codes, x_turned = encoded(x, OPERANDS)
    w_scale, w_codes, w_turned = encoded(w[None], OPERANDS)
    x8 = standing_for(x, x_codes, x_scale, OPERANDS, dtype)
    w8 = standing_for(w, w_codes[0], w_scale, OPERANDS, dtype)
    y = product(x8, w8, None, None, preferred_element_type)
    y = rounded_gradient(y.astype(preferred_element_type))
    return y, x_turned, x_scale, w_turned[:, 0], w_scale


def linear_fp8_bwd_reference(
    x: Float[Array, "b t d"],
    w: Float[Array, "f d"],
    x_turned: UInt8[Array, "d b t"],
    x_scale: Float[Array, ""],
    w_turned: UInt8[Array, "d f"],
    w_scale: Float[Array, ""],
    dy: Float[Array, "b t f"],
    *,
    preferred_element_type: jnp.dtype,
) -> tuple[Float[Array, "b t d"], Float[Array, "f d"]]:
    """x and w are here for their derivatives; their values are never read."""
    dtype = restored_dtype(x, w)
    dy_scale, dy_codes, dy_turned = encoded(dy, GRADIENTS)

    def turned(a, codes, scale, form):
        return standing_for(jnp.moveaxis(a, -1, 0), codes, scale, form, dtype)

    dy8 = standing_for(dy, dy_codes, dy_scale, GRADIENTS, dtype)
    dx = product(dy8, turned(w, w_turned, w_scale, OPERANDS), None, None, x.dtype)
    dw = lax.dot_general(
        turned(dy, dy_turned, dy_scale, GRADIENTS),
        turned(x, x_turned, x_scale, OPERANDS),
        (((1, 2), (1, 2)), ((), ())),
        preferred_element_type=jnp.promote_types(dtype, w.dtype),
    )
    return dx.astype(x.dtype), dw.astype(w.dtype)


def encoded(
    x: Float[Array, "b t d"], form: str
) -> tuple[Float[Array, ""], UInt8[Array, "b t d"], UInt8[Array, "d b t"]]:
    """Scale, codes and codes transposed; constants of differentiation."""
    x = lax.stop_gradient(x)
    scale = scale_of(x, form)
    return scale, *encode_fp8_p(x, scale, form=form)


def restored_dtype(x: Array, w: Array) -> jnp.dtype:
    """bfloat16 where both are, as it holds codes times scale exactly; else wider."""
    dtype = jnp.result_type(x.dtype, w.dtype)
    return dtype if dtype == jnp.bfloat16 else jnp.promote_types(dtype, jnp.float32)


linear_fp8_p = kernel_primitive(
    linear_fp8_reference,
    fwd=linear_fp8_fwd_reference,
    bwd=linear_fp8_bwd_reference,
    replicated=("b", "t", "f", "d"),  # a scale is of the whole tensor
    calls=(encode_fp8_p,),
)
