"""Walsh-Hadamard transform: y = scale * H_d x, H[i, j] = (-1)^popcount(i & j).

The fast transform of https://doi.org/10.1109/TC.1969.222658: H of a product of sizes is
the Kronecker product of small ones.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive

FACTOR_BITS = 5  # a product with a 32 x 32 matrix for every 5 bits of the index


@check_arguments
def fwht(
    x: Float[Array, "... d"], *, scale: str = "orthonormal", axis: int = -1
) -> Float[Array, "... d"]:
    """Walsh-Hadamard transform along one axis, in natural (Sylvester) order.

        y[i] = scale * sum_j (-1)^popcount(i & j) x[j]

    The matrix is `scipy.linalg.hadamard(d)`. It is symmetric: the transform is its own
    transpose, and "orthonormal" its own inverse. Sums in float32, one rounding.

    Source: https://doi.org/10.1109/TC.1969.222658.

    Args:
      x: `[..., d]`, any float dtype, d a power of two.
      scale: "orthonormal" for d ** -0.5, or "none" for 1.
      axis: the axis of d.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: d is no power of two.
      ValueError: `scale` is neither of the two.

    Example:
      >>> jaxkern.fwht(jnp.array([1.0, 2.0, 3.0, 4.0]), scale="none")
      Array([10., -2., -4.,  0.], dtype=float32)
      >>> jaxkern.fwht(jaxkern.fwht(jnp.array([1.0, 2.0, 3.0, 4.0])))  # its own inverse
      Array([1., 2., 3., 4.], dtype=float32)
    """
    if scale not in ("orthonormal", "none"):
        raise ValueError(
            f"fwht: `scale` must be 'orthonormal' or 'none', got {scale!r}."
        )
    axis = axis_within("fwht", axis, x.ndim)
    y = fwht_p(jnp.moveaxis(x, axis, -1), None, None, scale=scale)
    return jnp.moveaxis(y, -1, axis)


def fwht_reference(
    x: Float[Array, "... d"],
    signs_before: Int[Array, " d"] | None,
    signs_after: Int[Array, " d"] | None,
    *,
    scale: str,
) -> Float[Array, "... d"]:
    y = at_least_f32(x)
    if signs_before is not None:
        y = y * signs_before.astype(y.dtype)
    y = hadamard_product(y, scale=scale)
    if signs_after is not None:
        y = y * signs_after.astype(y.dtype)
    return y.astype(x.dtype)


def fwht_bwd_reference(
    signs_before: Int[Array, " d"] | None,
    signs_after: Int[Array, " d"] | None,
    dy: Float[Array, "... d"],
    *,
    scale: str,
) -> Float[Array, "... d"]:
    return fwht_reference(dy, signs_after, signs_before, scale=scale)


def hadamard_product(
    x: Float[Array, "... d"], *, scale: str = "orthonormal"
) -> Float[Array, "... d"]:
    """scale * H_d x in the dtype of x."""
    *lead, d = x.shape
    bits = d.bit_length() - 1
    if d != 2**bits:
        raise TypeError(
            f"fwht: the last dim of `x` must be a power of two, got shape {x.shape}."
        )
    while bits > 0:  # bits of the index, FACTOR_BITS at a time, the lowest first
        n = 2 ** min(bits, FACTOR_BITS)
        # the factor goes to the front each time, so all are in order at the end
        x = x.reshape(*lead, d // n, n)
        x = jnp.matmul(
            hadamard_matrix(n, x.dtype),
            jnp.swapaxes(x, -1, -2),
            precision=lax.Precision.HIGHEST,
        ).reshape(*lead, d)
        bits -= FACTOR_BITS
    return x * d**-0.5 if scale == "orthonormal" else x


def hadamard_matrix(n: int, dtype: jnp.dtype) -> Float[Array, "n n"]:
    """H of a small size; ones and minus ones."""
    i = np.arange(n)
    odd = np.bitwise_count(i[:, None] & i) % 2
    return jnp.asarray(1 - 2 * odd.astype(np.int32), dtype)


fwht_p = kernel_primitive(
    fwht_reference,
    bwd=fwht_bwd_reference,
    linear=("x",),
    replicated=("d",),  # every result is a sum over all of d
)
