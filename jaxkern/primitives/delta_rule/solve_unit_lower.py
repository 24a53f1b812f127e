"""X = L^-1 B for a unit lower triangular L."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def solve_unit_lower(
    lower: Float[Array, "... n n"], rhs: Float[Array, "... n m"]
) -> Float[Array, "... n m"]:
    """Solves L X = B, L with ones on the diagonal and `lower` below it.

        X = L^-1 B,   dB = L^-T dX,   dL = -tril(dB X^T, -1)

    The diagonal and the upper part of `lower` are not read, so they may hold anything,
    and their gradient is zero. `jax.lax.linalg.triangular_solve(unit_diagonal=True)` in
    float32 (float64 for float64 operands), also for the half precisions, one rounding.

    Args:
      lower: `[..., n, n]`, any float dtype.
      rhs: `[..., n, m]`, any float dtype, leading dims of lower.

    Returns:
      X: `[..., n, m]`, dtype of rhs.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.

    Example:
      >>> lower, rhs = jnp.array([[7.0, 7.0], [2.0, 7.0]]), jnp.array([[1.0], [5.0]])
      >>> jaxkern.solve_unit_lower(lower, rhs)  # of the 7s none is read
      Array([[1.],
             [3.]], dtype=float32)
    """
    return solve_unit_lower_p(lower, rhs)


def solve_unit_lower_reference(
    lower: Float[Array, "... n n"], rhs: Float[Array, "... n m"]
) -> Float[Array, "... n m"]:
    return substituted(lower, rhs, transpose=False).astype(rhs.dtype)


def solve_unit_lower_bwd_reference(
    lower: Float[Array, "... n n"],
    rhs: Float[Array, "... n m"],
    x: Float[Array, "... n m"],
    dx: Float[Array, "... n m"],
) -> tuple[Float[Array, "... n n"], Float[Array, "... n m"]]:
    drhs = substituted(lower, dx, transpose=True)
    xt = jnp.swapaxes(at_least_f32(x), -1, -2)
    dlower = -jnp.tril(jnp.matmul(drhs, xt, precision=lax.Precision.HIGHEST), -1)
    return dlower.astype(lower.dtype), drhs.astype(rhs.dtype)


def substituted(lower, rhs, transpose):
    dtype = jnp.result_type(at_least_f32(lower), at_least_f32(rhs))
    # zeros above, since a solver may multiply what it does not need
    matrix = jnp.tril(lower, -1).astype(dtype)

    def product(x):
        m = jnp.swapaxes(matrix, -1, -2) if transpose else matrix
        return x + jnp.matmul(m, x, precision=lax.Precision.HIGHEST)

    def solve(_, rhs, transpose=transpose):
        return lax.linalg.triangular_solve(
            matrix,
            rhs,
            left_side=True,
            lower=True,
            unit_diagonal=True,
            transpose_a=transpose,
        )

    # differentiates `product`: the jvp of triangular_solve refuses explicit meshes
    return lax.custom_linear_solve(
        product,
        rhs.astype(dtype),
        solve,
        functools.partial(solve, transpose=not transpose),
    )


solve_unit_lower_p = kernel_primitive(
    solve_unit_lower_reference,
    bwd=solve_unit_lower_bwd_reference,
    replicated=("n",),  # each row needs those before it
)
