"""Linear layer: y = x w^T + bias, for dense and for quantised weights."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.kernel_primitive import at_least_f32
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul


def linear(
    x: Float[Array, "... d"],
    w: Float[Array, "f d"] | GGUFTensor,
    bias: Float[Array, " f"] | None = None,
) -> Float[Array, "... f"]:
    """Matrix product with a weight stored output-major, as checkpoints store it.

        y[..., f] = sum_d x[..., d] * w[f, d] + bias[f]

    Sums in float32 (float64 for float64 operands), rounds once to x.dtype. The dense
    product is `lax.dot_general` and takes its precision from
    `jax.default_matmul_precision`; a `GGUFTensor` goes to `quantized_matmul`.

    Args:
      x: `[..., d]`, any float dtype.
      w: `[f, d]`, an array of any float dtype or a `GGUFTensor`.
      bias: `[f]`, or None.

    Returns:
      y: `[..., f]`, dtype of x.

    Raises:
      TypeError: `w` or `bias` does not fit.
    """
