"""y = x8 w8^T, where x8 and w8 are x and w rounded to e4m3 with a scale each.

https://arxiv.org/abs/2209.05433. On GPUs of compute capability 8.9 and higher XLA finds
the products of codes times scale and makes them in fp8; elsewhere they are products of
bfloat16, or of float32, with the same operands.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.dense_product import product
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.linear.scaled_float8 import (
    OPERANDS,
    encoded,
    rounded_gradient,
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
    y = rounded_gradient(y)
    return y if len(lead) == 2 else y.reshape(*lead, w.shape[0])


def linear_fp8_fwd_reference(
    x: Float[Array, "b t d"],
    w: Float[Array, "f d"],
    *,
    preferred_element_type: jnp.dtype,
) -> tuple[
    Float[Array, "b t f"],
    UInt8[Array, "b t d"],
    Float[Array, ""],
    UInt8[Array, "f d"],
    Float[Array, ""],
]:
    dtype = restored_dtype(x, w)
    x_codes, x_scale = encoded(x, OPERANDS)
    w_codes, w_scale = encoded(w, OPERANDS)
    y = product(
        standing_for(x, x_codes, x_scale, OPERANDS, dtype),
        standing_for(w, w_codes, w_scale, OPERANDS, dtype),
        None,
        None,
        preferred_element_type,
    )
    return y.astype(preferred_element_type), x_codes, x_scale, w_codes, w_scale


def linear_fp8_bwd_reference(
    x: Float[Array, "b t d"],
    w: Float[Array, "f d"],
    x_codes: UInt8[Array, "b t d"],
    x_scale: Float[Array, ""],
    w_codes: UInt8[Array, "f d"],
    w_scale: Float[Array, ""],
    dy: Float[Array, "b t f"],
    *,
    preferred_element_type: jnp.dtype,
) -> tuple[Float[Array, "b t d"], Float[Array, "f d"]]:
    """x and w are here for their derivatives; their values are never read."""
    dtype = restored_dtype(x, w, dy)
    x8 = standing_for(x, x_codes, x_scale, OPERANDS, dtype)
    w8 = standing_for(w, w_codes, w_scale, OPERANDS, dtype)
    dy = dy.astype(dtype)
    dx = product(dy, w8.T, None, None, x.dtype)
    dw = lax.dot_general(
        dy,
        x8,
        (((0, 1), (0, 1)), ((), ())),
        preferred_element_type=jnp.promote_types(dtype, w.dtype),
    )
    return dx.astype(x.dtype), dw.astype(w.dtype)


def restored_dtype(*arrays: Array) -> jnp.dtype:
    """bfloat16 where all are, as it holds codes times scale exactly; else wider."""
    dtype = jnp.result_type(*(a.dtype for a in arrays))
    return dtype if dtype == jnp.bfloat16 else jnp.promote_types(dtype, jnp.float32)


linear_fp8_reference = without_residuals(linear_fp8_fwd_reference)
linear_fp8_p = kernel_primitive(
    linear_fp8_reference,
    fwd=linear_fp8_fwd_reference,
    bwd=linear_fp8_bwd_reference,
    replicated=("b", "t", "f", "d"),  # a scale is of the whole tensor
)
