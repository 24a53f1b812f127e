"""Masked softmax: y = exp(scale * x) / sum(exp(scale * x)), over the kept elements."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


def softmax(
    x: Float[Array, "..."],
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float = 1.0,
    axis: int = -1,
) -> Float[Array, "..."]:
    """Softmax along one axis, over the elements that the mask keeps.

        y = exp(scale * x - m) / sum(exp(scale * x - m)),  m = max(scale * x)

    with max and sum over the kept elements; y = 0 elsewhere. Computed in float32 and
    rounded once; the backward pass needs only y.

    A row with nothing to keep, masked or all -inf, gives zeros with zero gradients
    (`jax.nn.softmax` gives NaN for a row of -inf). NaN and +inf in a kept element make
    its row NaN; in a masked element they are not seen. For an additive mask write
    `softmax(scale * x + bias)`: XLA fuses the sum.

    Args:
      x: `[...]`, any float dtype, at least one dim.
      mask: bool, broadcastable to the shape of x: True keeps an element.
      scale: factor of x.
      axis: the dim to sum over.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: `mask` is not bool or does not broadcast to x.
    """
    axis = axis_within("softmax", axis, x.ndim)
    if mask is not None:
        mask = broadcast_mask(mask, x.shape)
        mask = jnp.moveaxis(mask, axis, -1)
    y = softmax_p(jnp.moveaxis(x, axis, -1), mask, scale=float(scale))
    return jnp.moveaxis(y, -1, axis)


def broadcast_mask(
    mask: Bool[Array, "..."], shape: tuple[int, ...]
) -> Bool[Array, "..."]:
    try:
        return jnp.broadcast_to(mask, shape)
    except ValueError:
        raise TypeError(
            f"softmax: `mask` of shape {mask.shape} must broadcast to x's {shape}."
        ) from None


def softmax_reference(
    x: Float[Array, "... s"], mask: Bool[Array, "... s"] | None, *, scale: float
) -> Float[Array, "... s"]:
    z = at_least_f32(x) * scale
    if mask is not None:
        z = jnp.where(mask, z, -jnp.inf)
    top = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True, initial=-jnp.inf))
    weight = jnp.exp(z - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return (weight / jnp.where(total == 0, 1, total)).astype(x.dtype)


def softmax_bwd_reference(
    y: Float[Array, "... s"], dy: Float[Array, "... s"], *, scale: float
) -> Float[Array, "... s"]:
    y32, dy32 = at_least_f32(y), at_least_f32(dy)
    mean = jnp.sum(y32 * dy32, axis=-1, keepdims=True)
    return (scale * y32 * (dy32 - mean)).astype(y.dtype)


softmax_p = kernel_primitive(
    softmax_reference,
    bwd=softmax_bwd_reference,
    replicated=("s",),  # the sum runs over s: each device needs all of it
)
