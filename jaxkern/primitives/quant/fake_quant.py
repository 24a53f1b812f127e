"""Quantisation-aware training: the rounded weights forward, the identity backward."""

from typing import Any

import jax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32
from jaxkern.primitives.quant.dequantize import dequantize
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor
from jaxkern.primitives.quant.requantize import QUANTIZE


@check_arguments
def fake_quant(
    x: Float[Array, "... d"], to: str | QuantizedTensor, **options: Any
) -> Float[Array, "... d"]:
    """Rounds `x` to a quantised format and back, with a straight-through gradient.

        y = dequantize(quantize(x)),    dx = dy

    With a container in the place of a format its codes are kept as they are, y is
    `dequantize(to)`, and its scales and biases get their gradients too. Without the
    gradient to `x` that is `dequantize` itself.

        frozen = quantize_affine(w, quantizer="minmax", packed=False)
        y = fake_quant(w, frozen)  # dw = dy, dscales = sum of q dy, dbiases = sum of dy

    Source: https://arxiv.org/abs/1712.05877.

    Args:
      x: `[..., d]`, finite, any float dtype.
      to: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "affine", "int" or "nf4", or a
        container of x's shape.
      options: those of `quantize_gguf`, `quantize_affine`, `quantize_int`,
        `quantize_nf4`.

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      ValueError: no such format.
      TypeError: the container has another shape.

    Example:
      >>> x = jnp.linspace(-1.0, 1.0, 32)
      >>> jaxkern.fake_quant(x, "Q4_0")[:4]
      Array([-1.   , -0.875, -0.875, -0.75 ], dtype=float32)
      >>> jax.grad(lambda x: jaxkern.fake_quant(x, "Q4_0").sum())(x)[:4]
      Array([1., 1., 1., 1.], dtype=float32)
    """
    if isinstance(to, str):
        if to not in QUANTIZE:
            raise ValueError(
                f"fake_quant: `to` must be one of {', '.join(QUANTIZE)}, got {to!r}."
            )
        to = QUANTIZE[to](jax.lax.stop_gradient(x), **options)
    if to.shape != x.shape:
        raise TypeError(f"fake_quant: `x` has shape {x.shape} but `to` has {to.shape}.")
    wide = at_least_f32(x)
    y = dequantize(to, dtype=wide.dtype)
    # x - x is zero, but for its gradient
    return (y + (wide - jax.lax.stop_gradient(wide))).astype(x.dtype)
