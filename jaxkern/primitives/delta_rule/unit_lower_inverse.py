"""The inverse of I + A, A strictly lower triangular, in small blocks.

The inverse of the chunk matrix of a delta rule  (https://arxiv.org/abs/2412.06464).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


def unit_lower_inverse(a: Float[Array, "... c c"]) -> Float[Array, "... c c"]:
    """Inverts I + A for each c x c block, A the strictly lower part of `a`.

        X = (I + tril(a, -1))^-1,   da = -tril(X^T dX X^T, -1)

    The diagonal and the upper part of `a` are not read, so they may hold anything, and
    their gradient is zero. Blocks of 1, 2, 4 ... rows are inverted from their halves:
    log2(c) steps of matrix products, as stable as forward substitution, which a
    Neumann series is not. Made for c up to some hundred; for one large system call
    `solve_unit_lower`.

    Args:
      a: `[..., c, c]`, any float dtype.

    Returns:
      X: `[..., c, c]`, dtype of a, unit lower triangular. Products in full float32
        (float64 for a float64 `a`), one rounding.

    Raises:
      TypeError: `a` is not an array of floats with two equal last dims.
    """
    return unit_lower_inverse_p(a)


def unit_lower_inverse_reference(a: Float[Array, "... c c"]) -> Float[Array, "... c c"]:
    c = a.shape[-1]
    row, column = jnp.arange(c)[:, None], jnp.arange(c)
    a32 = at_least_f32(a)
    # Inverse of the diagonal blocks of `size` rows; below, two become one:
    # [[L, 0], [A, M]]^-1 = [[X, 0], [-Y A X, Y]]  with X = L^-1, Y = M^-1
    x = jnp.zeros_like(a32) + jnp.eye(c, dtype=a32.dtype)
    size = 1
    while size < c:
        pair = row // (2 * size) == column // (2 * size)
        between = pair & (row // size > column // size)
        x = x - product(product(x, jnp.where(between, a32, 0)), x)
        size *= 2
    return x.astype(a.dtype)


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
