"""The inverse of I + A, A strictly lower triangular, in small blocks.

The inverse of the chunk matrix of a delta rule  (https://arxiv.org/abs/2412.06464).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def unit_lower_inverse(a: Float[Array, "... c c"]) -> Float[Array, "... c c"]:
    """Inverts I + A for each c x c block, A the strictly lower part of `a`.

        X = (I + tril(a, -1))^-1,   da = -tril(X^T dX X^T, -1)

    The diagonal and the upper part of `a` are not read, so they may hold anything, and
    their gradient is zero. Blocks of 4, 8, 16 ... rows are inverted from their halves:
    log2(c) steps of matrix products, as stable as forward substitution, which a
    Neumann series is not. Made for c up to some hundred; for one large system call
    `solve_unit_lower`.

    Source: https://arxiv.org/abs/2412.06464.

    Args:
      a: `[..., c, c]`, any float dtype.

    Returns:
      X: `[..., c, c]`, dtype of a, unit lower triangular. Products in full float32
        (float64 for a float64 `a`), one rounding.

    Raises:
      TypeError: `a` is not an array of floats with two equal last dims.

    Example:
      >>> jaxkern.unit_lower_inverse(jnp.array([[7.0, 7.0], [2.0, 7.0]]))
      Array([[ 1.,  0.],
             [-2.,  1.]], dtype=float32)
    """
    return unit_lower_inverse_p(a)


def unit_lower_inverse_reference(a: Float[Array, "... c c"]) -> Float[Array, "... c c"]:
    c = a.shape[-1]
    fill = (1 << max(c - 1, 0).bit_length()) - c  # to a power of two
    a32 = jnp.pad(at_least_f32(a), [(0, 0)] * (a.ndim - 2) + [(0, fill)] * 2)
    return inverse_from_halves(a32)[..., :c, :c].astype(a.dtype)


def inverse_from_halves(a):
    """[[L, 0], [A, M]]^-1 = [[X, 0], [-Y A X, Y]] with X = L^-1 and Y = M^-1."""
    if a.shape[-1] <= 2:
        return jnp.eye(a.shape[-1], dtype=a.dtype) - jnp.tril(a, -1)
    h = a.shape[-1] // 2
    x, y = inverse_from_halves(jnp.stack([a[..., :h, :h], a[..., h:, h:]]))
    below = -product(product(y, a[..., h:, :h]), x)
    upper = jnp.concatenate([x, jnp.zeros_like(x)], -1)
    return jnp.concatenate([upper, jnp.concatenate([below, y], -1)], -2)


def unit_lower_inverse_bwd_reference(
    x: Float[Array, "... c c"], dx: Float[Array, "... c c"]
) -> Float[Array, "... c c"]:
    xt = jnp.swapaxes(at_least_f32(x), -1, -2)
    return -jnp.tril(product(product(xt, at_least_f32(dx)), xt), -1).astype(x.dtype)


def product(x, y):
    """x @ y in full float32: an error in one block grows through the others."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


unit_lower_inverse_p = kernel_primitive(
    unit_lower_inverse_reference,
    bwd=unit_lower_inverse_bwd_reference,
    replicated=("c",),
)
