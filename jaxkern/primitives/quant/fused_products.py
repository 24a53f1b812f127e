"""Products with quantised weights and what stands around them, in one op.

    quantized_rms_norm_matmul  y = rms_norm(x) w^T
    quantized_swiglu           y = silu(x gate^T) * (x up^T), or with gelu
    quantized_matmul_add       y = residual + x w^T

So a block of a transformer is four products and attention. The norm is taken while x is
rounded for the product; gate and up read x once; what comes before silu or the addition
never reaches memory. Rows that are interleaved have a kernel, and on GPUs a plain array
of bfloat16 has; other containers run the ops one after the other.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.activation.geglu import geglu, geglu_reference
from jaxkern.primitives.activation.swiglu import swiglu, swiglu_reference
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.dense_product import product, result_dtype
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.rms_norm import rms_norm, rms_norm_reference
from jaxkern.primitives.quant.interleaved_matmul import (
    INTERLEAVED,
    interleaved_matmul_p,
)
from jaxkern.primitives.quant.interleaved_tensor import ROWS, InterleavedTensor
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul

Activation = Literal["silu", "gelu_tanh"]


@check_arguments
def quantized_rms_norm_matmul(
    x: Float[Array, "... d"],
    norm: Float[Array, " d"],
    w: Any,
    bias: Float[Array, " f"] | None = None,
    *,
    eps: float = 1e-6,
    compute_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "... f"]:
    """The product that begins a block: y = (x / rms(x) * norm) w^T + bias.

    With interleaved rows in float32 (or wider) and rounded once; else as `rms_norm` and
    `quantized_matmul`.

    Args:
      x: `[..., d]`, any float dtype.
      norm: `[d]`, the weight of the norm.
      w: `[f, d]`, any container of quantised weights, or an array of a float dtype.
      bias: `[f]` or None; added before the rounding where w is an array, else after it.
      eps: see `rms_norm`.
      compute_dtype, preferred_element_type: see `quantized_matmul`.

    Returns:
      y: `[..., f]`, dtype of x unless another is preferred.

    Raises:
      TypeError: see `rms_norm` and `quantized_matmul`.
      ValueError: eps is negative or not finite.

    Example:
      >>> x, norm = jnp.full((1, 32), 2.0), jnp.ones(32)
      >>> w = jaxkern.quantize_gguf(jnp.ones((4, 32)), "Q8_0")
      >>> jaxkern.quantized_rms_norm_matmul(x, norm, w)
      Array([[31.998, 31.998, 31.998, 31.998]], dtype=float32)
    """
    x, result = in_wider("quantized_rms_norm_matmul", x, preferred_element_type)
    if is_dense(w):
        return dense_rms_norm_matmul_p(x, w, norm, bias, eps=eps).astype(result)
    if not isinstance(w, InterleavedTensor) or w.ndim != 2:
        x = rms_norm(x, norm, eps=eps)
        y = quantized_matmul(x, w, compute_dtype=compute_dtype)
        return with_bias(y, bias).astype(result)
    y = interleaved_rms_norm_matmul_p(
        x,
        w.tiles,
        norm,
        qtype=w.qtype,
        compute_dtype=as_dtype(compute_dtype),
        eps=eps,
    )
    y = y.reshape(*x.shape[:-1], w.shape[0])
    return with_bias(y, bias).astype(result)


@check_arguments
def quantized_swiglu(
    x: Float[Array, "... d"],
    w: Any,
    norm: Float[Array, " d"] | None = None,
    up: Float[Array, "... f"] | None = None,
    *,
    activation: Activation = "silu",
    eps: float = 1e-6,
    compute_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "... f"]:
    """The gated half of a feed-forward block: y = activation(x gate^T) * (x up^T).

    With interleaved rows in float32 (or wider) and rounded once; else as
    `quantized_matmul` and `swiglu` or `geglu`.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[2 f, d]`, any container of quantised weights, or an array of a float dtype:
        the rows of gate, then of up; or `[f, d]`, those of gate, where `up` is given.
      norm: `[d]`: x / rms(x) * norm stands for x. None: x itself.
      up: `[..., f]`, dtype of x, in the place of x up^T; or None.
      activation: "silu", or "gelu_tanh" for that of `geglu`.
      eps: of the norm, see `rms_norm`.
      compute_dtype, preferred_element_type: see `quantized_matmul`.

    Returns:
      y: `[..., f]`, dtype of x unless another is preferred.

    Raises:
      TypeError: see `quantized_matmul` and `swiglu`; `up` has another shape or dtype.
      ValueError: an unknown activation; or eps is negative or not finite.

    Example:
      >>> x = jnp.full((1, 32), 0.125)
      >>> w = jaxkern.quantize_gguf(jnp.ones((4, 32)), "Q8_0")  # gate, then up
      >>> jaxkern.quantized_swiglu(x, w)
      Array([[15.71, 15.71]], dtype=float32)
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(
            "quantized_swiglu: `activation` must be 'silu' or 'gelu_tanh', got "
            f"{activation!r}."
        )
    if up is not None:
        check_as_product("quantized_swiglu", "up", up, x, w)
    x, result = in_wider("quantized_swiglu", x, preferred_element_type)
    up = None if up is None else up.astype(x.dtype)
    halves = 2 if up is None else 1
    options: dict = dict(eps=eps, activation=activation)
    if is_dense(w) and w.shape[0] % halves == 0:
        each = w.reshape(halves, -1, w.shape[1])
        return dense_swiglu_p(x, each, norm, up, **options).astype(result)
    interleaved = isinstance(w, InterleavedTensor) and w.ndim == 2
    if not interleaved or w.shape[0] % (halves * ROWS):
        x = x if norm is None else rms_norm(x, norm, eps=eps)
        gate = quantized_matmul(x, w, compute_dtype=compute_dtype)
        return (swiglu if activation == "silu" else geglu)(gate, up).astype(result)
    u, tile_bytes = w.tiles.shape
    y = interleaved_swiglu_p(
        x,
        w.tiles.reshape(halves, u // halves, tile_bytes),
        norm,
        None if up is None else up.reshape(*x.shape[:-1], u, ROWS),
        qtype=w.qtype,
        compute_dtype=as_dtype(compute_dtype),
        **options,
    )
    return y.reshape(*x.shape[:-1], w.shape[0] // halves).astype(result)


@check_arguments
def quantized_matmul_add(
    x: Float[Array, "... d"],
    w: Any,
    residual: Float[Array, "... f"],
    bias: Float[Array, " f"] | None = None,
    *,
    compute_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "... f"]:
    """A product that is added to what a layer began with: y = residual + x w^T + bias.

    With interleaved rows in float32 (or wider) and rounded once; else as
    `quantized_matmul` and an addition.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[f, d]`, any container of quantised weights, or an array of a float dtype.
      residual: `[..., f]`, dtype of x.
      bias: `[f]`, added before the rounding where w is an array, else to the residual;
        or None.
      compute_dtype, preferred_element_type: see `quantized_matmul`.

    Returns:
      y: `[..., f]`, dtype of x unless another is preferred.

    Raises:
      TypeError: see `quantized_matmul`; or `residual` has another shape or dtype.

    Example:
      >>> x, residual = jnp.ones((1, 32)), jnp.full((1, 4), 100.0)
      >>> w = jaxkern.quantize_gguf(jnp.ones((4, 32)), "Q8_0")
      >>> jaxkern.quantized_matmul_add(x, w, residual)
      Array([[131.998, 131.998, 131.998, 131.998]], dtype=float32)
    """
    check_as_product("quantized_matmul_add", "residual", residual, x, w)
    x, result = in_wider("quantized_matmul_add", x, preferred_element_type)
    residual = residual.astype(x.dtype)
    if is_dense(w):
        return dense_matmul_add_p(x, w, residual, bias).astype(result)
    residual = with_bias(residual, bias)
    if not isinstance(w, InterleavedTensor) or w.ndim != 2:
        y = residual + quantized_matmul(x, w, compute_dtype=compute_dtype)
        return y.astype(result)
    y = interleaved_matmul_add_p(
        x,
        w.tiles,
        residual.reshape(*x.shape[:-1], w.tiles.shape[0], ROWS),
        qtype=w.qtype,
        compute_dtype=as_dtype(compute_dtype),
    )
    return y.reshape(*x.shape[:-1], w.shape[0]).astype(result)


def check_as_product(op: str, name: str, beside: Array, x: Array, w: Any) -> None:
    """What stands beside x w^T has its shape, and the dtype of x."""
    expected = (*x.shape[:-1], w.shape[-2])
    if beside.shape != expected or beside.dtype != x.dtype:
        raise TypeError(
            f"{op}: `{name}` must be {x.dtype} {expected}, got "
            f"{beside.dtype} {beside.shape}."
        )


def in_wider(op: str, x: Array, preferred: DTypeLike | None) -> tuple[Array, jnp.dtype]:
    """x in a dtype that holds the result's, and that: a product has the dtype of x."""
    result = result_dtype(op, preferred, x.dtype)
    return x.astype(jnp.promote_types(x.dtype, result)), result


def with_bias(
    y: Float[Array, "... f"], bias: Float[Array, " f"] | None
) -> Float[Array, "... f"]:
    return y if bias is None else y + bias.astype(y.dtype)


def is_dense(w: Any) -> bool:
    return isinstance(w, jax.Array | np.ndarray) and w.ndim == 2


def as_dtype(compute_dtype: DTypeLike | None) -> jnp.dtype | None:
    return None if compute_dtype is None else jnp.dtype(compute_dtype)


def interleaved_rms_norm_matmul_reference(
    x: Float[Array, "... d"],
    tiles: UInt8[Array, "u tile_bytes"],
    norm: Float[Array, " d"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
    eps: float,
) -> Float[Array, "... u 16"]:
    INTERLEAVED.check_columns(
        "interleaved_rms_norm_matmul", x, [tiles], {"qtype": qtype}
    )
    normal = rms_norm_reference(at_least_f32(x), norm, None, eps=eps, offset=0.0)
    y = interleaved_matmul_p.reference(
        normal, tiles, qtype=qtype, compute_dtype=compute_dtype
    )
    return y.astype(x.dtype)


def interleaved_swiglu_reference(
    x: Float[Array, "... d"],
    tiles: UInt8[Array, "p u tile_bytes"],
    norm: Float[Array, " d"] | None,
    up: Float[Array, "... u 16"] | None,
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
    eps: float,
    activation: str,
) -> Float[Array, "... u 16"]:
    INTERLEAVED.check_columns("interleaved_swiglu", x, [tiles], {"qtype": qtype})
    x32 = in_float32(x, norm, eps)
    products = [
        interleaved_matmul_p.reference(
            x32, half, qtype=qtype, compute_dtype=compute_dtype
        )
        for half in tiles
    ]
    return gated(products, up, activation).astype(x.dtype)


def in_float32(x: Array, norm: Array | None, eps: float) -> Array:
    """At least float32, normalised where there is a norm."""
    x32 = at_least_f32(x)
    if norm is None:
        return x32
    return rms_norm_reference(x32, norm, None, eps=eps, offset=0.0)


def gated(products: Sequence[Array], up: Array | None, activation: str) -> Array:
    """activation(gate) * up, of products with gate, and with up where that is None."""
    gate, up = products if up is None else (*products, at_least_f32(up))
    if activation == "silu":
        return swiglu_reference(gate, up)
    return geglu_reference(gate, up, approximate="tanh")


def interleaved_matmul_add_reference(
    x: Float[Array, "... d"],
    tiles: UInt8[Array, "u tile_bytes"],
    residual: Float[Array, "... u 16"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... u 16"]:
    INTERLEAVED.check_columns("interleaved_matmul_add", x, [tiles], {"qtype": qtype})
    y = interleaved_matmul_p.reference(
        at_least_f32(x), tiles, qtype=qtype, compute_dtype=compute_dtype
    )
    return (y + at_least_f32(residual)).astype(x.dtype)


def dense_rms_norm_matmul_reference(
    x: Float[Array, "... d"],
    w: Float[Array, "f d"],
    norm: Float[Array, " d"],
    bias: Float[Array, " f"] | None,
    *,
    eps: float,
) -> Float[Array, "... f"]:
    normal = rms_norm_reference(at_least_f32(x), norm, None, eps=eps, offset=0.0)
    y = product(normal, w, None, None, jnp.dtype(jnp.float32))
    return with_bias(y, bias).astype(x.dtype)


def dense_swiglu_reference(
    x: Float[Array, "... d"],
    w: Float[Array, "p f d"],
    norm: Float[Array, " d"] | None,
    up: Float[Array, "... f"] | None,
    *,
    eps: float,
    activation: str,
) -> Float[Array, "... f"]:
    x32 = in_float32(x, norm, eps)
    float32 = jnp.dtype(jnp.float32)
    products = [product(x32, half, None, None, float32) for half in w]
    return gated(products, up, activation).astype(x.dtype)


def dense_matmul_add_reference(
    x: Float[Array, "... d"],
    w: Float[Array, "f d"],
    residual: Float[Array, "... f"],
    bias: Float[Array, " f"] | None,
) -> Float[Array, "... f"]:
    y = product(at_least_f32(x), w, None, None, jnp.dtype(jnp.float32))
    return (with_bias(y, bias) + at_least_f32(residual)).astype(x.dtype)


dense_rms_norm_matmul_p = kernel_primitive(
    dense_rms_norm_matmul_reference, replicated=("d",)
)
dense_swiglu_p = kernel_primitive(dense_swiglu_reference, replicated=("p", "d"))
dense_matmul_add_p = kernel_primitive(dense_matmul_add_reference, replicated=("d",))
interleaved_rms_norm_matmul_p = kernel_primitive(
    interleaved_rms_norm_matmul_reference, replicated=INTERLEAVED.whole
)
interleaved_swiglu_p = kernel_primitive(
    interleaved_swiglu_reference, replicated=("p", *INTERLEAVED.whole)
)
interleaved_matmul_add_p = kernel_primitive(
    interleaved_matmul_add_reference, replicated=INTERLEAVED.whole
)
