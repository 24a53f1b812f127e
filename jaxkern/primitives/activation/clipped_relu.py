"""Clipped ReLU: y = min(max(x, 0), ceiling)  (https://arxiv.org/abs/1412.5567)."""

from jaxtyping import Array, Float

from jaxkern.primitives.activation.activations import activate
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def clipped_relu(x: Float[Array, "..."], ceiling: float = 6.0) -> Float[Array, "..."]:
    """Rectified linear unit with a ceiling (Deep Speech, https://arxiv.org/abs/1412.5567).

        y = min(max(x, 0), ceiling),    dx = dy where 0 < x < ceiling, else 0

    `jax.nn.relu6` is the ceiling 6. (`jnp.clip` halves the gradient at its bounds.)
    NaN propagates.

    Args:
      x: `[...]`, any float dtype.
      ceiling: positive, in units of x.

    Returns:
      y: shape and dtype of x.

    Raises:
      ValueError: `ceiling` is not positive.

    Example:
      >>> jaxkern.clipped_relu(jnp.array([-1.0, 3.0, 9.0]))
      Array([0., 3., 6.], dtype=float32)
      >>> jax.grad(jaxkern.clipped_relu)(9.0).item()
      0.0
    """
    if not ceiling > 0:
        raise ValueError(f"clipped_relu: `ceiling` must be positive, got {ceiling}.")
    return clipped_relu_p(x, ceiling=float(ceiling))


def clipped_relu_reference(
    x: Float[Array, "..."], *, ceiling: float
) -> Float[Array, "..."]:
    return activate(at_least_f32(x), "clipped_relu", ceiling)[0].astype(x.dtype)


def clipped_relu_bwd_reference(
    x: Float[Array, "..."], dy: Float[Array, "..."], *, ceiling: float
) -> Float[Array, "..."]:
    slope = activate(at_least_f32(x), "clipped_relu", ceiling)[1]
    return (at_least_f32(dy) * slope).astype(x.dtype)


clipped_relu_p = kernel_primitive(
    clipped_relu_reference, bwd=clipped_relu_bwd_reference
)
