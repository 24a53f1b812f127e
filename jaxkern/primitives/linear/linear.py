"""Linear layer: y = x w^T + bias, for dense and for quantised weights."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.kernel_primitive import at_least_f32
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor


def linear(
    x: Float[Array, "... d"],
    w: Float[Array, "f d"] | QuantizedTensor,
    bias: Float[Array, " f"] | None = None,
) -> Float[Array, "... f"]:
    """Matrix product with a weight stored output-major, as checkpoints store it.

        y[..., f] = sum_d x[..., d] * w[f, d] + bias[f]

    Sums in float32 (float64 for float64 operands). The dense product is
    `lax.dot_general` at the precision of `jax.default_matmul_precision`, rounded once,
    after the bias. A quantised tensor goes to `quantized_matmul`, whose result has
    x.dtype already when the bias is added.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[f, d]`, an array of any float dtype or a quantised tensor.
      bias: `[f]`, or None.

    Returns:
      y: `[..., f]`, dtype of x.

    Raises:
      TypeError: `w` or `bias` does not fit.
    """
    if isinstance(w, jax.Array | np.ndarray):
        y = _dense_product(x, w)
    else:
        y = quantized_matmul(x, w)
    if bias is None:
        return y.astype(x.dtype)
    if bias.shape != y.shape[-1:]:
        raise TypeError(
            f"linear: `bias` must have shape {y.shape[-1:]}, got {bias.shape}."
        )
    return (at_least_f32(y) + bias).astype(x.dtype)


def _dense_product(
    x: Float[Array, "... d"], w: Float[Array | np.ndarray, "f d"]
) -> Float[Array, "... f"]:
    """The product in float32, not yet rounded."""
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise TypeError(
            f"linear: `x` must be [..., d] and `w` [f, d], got {x.shape} and {w.shape}."
        )
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return lax.dot_general(
        x.astype(dtype),
        w.astype(dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
