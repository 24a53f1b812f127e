"""Products with quantised weights and what follows them, in one op.

    quantized_swiglu      y = silu(x gate^T) * (x up^T)
    quantized_matmul_add  y = residual + x w^T

The gate and up products read and round x once; their results and that of the product
before the addition never reach memory. Rows that are interleaved have a kernel; other
containers run the ops one after the other.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.activation.swiglu import swiglu, swiglu_reference
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.quant.interleaved_matmul import (
    WHOLE,
    interleaved_matmul_reference,
)
from jaxkern.primitives.quant.interleaved_tensor import ROWS, InterleavedTensor
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul


def quantized_swiglu(
    x: Float[Array, "... d"], w: Any, *, compute_dtype: DTypeLike | None = None
) -> Float[Array, "... f"]:
    """The gated half of a feed-forward block: y = silu(x gate^T) * (x up^T).

    With interleaved rows in float32 (or wider) and rounded once; else as
    `quantized_matmul` and `swiglu`.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[2 f, d]`, any container of quantised weights: the rows of gate, then of up.
      compute_dtype: see `quantized_matmul`.

    Returns:
      y: `[..., f]`, dtype of x.

    Raises:
      TypeError: see `quantized_matmul` and `swiglu`.
    """
    if not isinstance(w, InterleavedTensor) or w.ndim != 2 or w.shape[0] % (2 * ROWS):
        return swiglu(quantized_matmul(x, w, compute_dtype=compute_dtype))
    u, tile_bytes = w.tiles.shape
    y = interleaved_swiglu_p(
        x,
        w.tiles.reshape(2, u // 2, tile_bytes),
        qtype=w.qtype,
        compute_dtype=as_dtype(compute_dtype),
    )
    return y.reshape(*x.shape[:-1], w.shape[0] // 2)


def quantized_matmul_add(
    x: Float[Array, "... d"],
    w: Any,
    residual: Float[Array, "... f"],
    *,
    compute_dtype: DTypeLike | None = None,
) -> Float[Array, "... f"]:
    """A product that is added to what a layer began with: y = residual + x w^T.

    With interleaved rows in float32 (or wider) and rounded once; else as
    `quantized_matmul` and an addition.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[f, d]`, any container of quantised weights.
      residual: `[..., f]`, dtype of x.
      compute_dtype: see `quantized_matmul`.

    Returns:
      y: `[..., f]`, dtype of x.

    Raises:
      TypeError: see `quantized_matmul`; or `residual` has another shape or dtype.
    """
    expected = (*x.shape[:-1], w.shape[-2])
    if residual.shape != expected or residual.dtype != x.dtype:
        raise TypeError(
            f"quantized_matmul_add: `residual` must be {x.dtype} {expected}, got "
            f"{residual.dtype} {residual.shape}."
        )
    if not isinstance(w, InterleavedTensor) or w.ndim != 2:
        return residual + quantized_matmul(x, w, compute_dtype=compute_dtype)
    y = interleaved_matmul_add_p(
        x,
        w.tiles,
        residual.reshape(*x.shape[:-1], w.tiles.shape[0], ROWS),
        qtype=w.qtype,
        compute_dtype=as_dtype(compute_dtype),
    )
    return y.reshape(expected)


def as_dtype(compute_dtype: DTypeLike | None) -> jnp.dtype | None:
    return None if compute_dtype is None else jnp.dtype(compute_dtype)


def interleaved_swiglu_reference(
    x: Float[Array, "... d"],
    tiles: UInt8[Array, "2 u tile_bytes"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... u 16"]:
    gate, up = (
        interleaved_matmul_reference(
            at_least_f32(x), half, qtype=qtype, compute_dtype=compute_dtype
        )
        for half in tiles
    )
    return swiglu_reference(gate, up).astype(x.dtype)


def interleaved_matmul_add_reference(
    x: Float[Array, "... d"],
    tiles: UInt8[Array, "u tile_bytes"],
    residual: Float[Array, "... u 16"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... u 16"]:
    y = interleaved_matmul_reference(
        at_least_f32(x), tiles, qtype=qtype, compute_dtype=compute_dtype
    )
    return (y + at_least_f32(residual)).astype(x.dtype)


interleaved_swiglu_p = kernel_primitive(interleaved_swiglu_reference, replicated=WHOLE)
interleaved_matmul_add_p = kernel_primitive(
    interleaved_matmul_add_reference, replicated=WHOLE
)
