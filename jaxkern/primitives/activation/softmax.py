"""Masked softmax: y = exp(scale * x) / sum(exp(scale * x)), over the kept elements."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def softmax(
    x: Float[Array, "..."],
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    axis: int = -1,
) -> Float[Array, "..."]:
    """Softmax along one axis, over the elements that the mask keeps.

        y = exp(z - m) / sum(exp(z - m)),  m = max(z),  z = scale * x
                                        or z = softcap * tanh(scale * x / softcap)

    with max and sum over the kept elements; y = 0 elsewhere. Computed in float32 and
    rounded once; the backward pass needs only y, with a `softcap` also x.

    A row with nothing to keep, masked or all -inf, gives zeros with zero gradients
    (`jax.nn.softmax` gives NaN for a row of -inf). NaN and +inf in a kept element make
    its row NaN; in a masked element they are not seen. A `softcap` makes infinities
    finite: only the mask hides then. For an additive mask write
    `softmax(scale * x + bias)`: XLA fuses the sum.

    Args:
      x: `[...]`, any float dtype, at least one dim.
      mask: bool, broadcastable to the shape of x: True keeps an element.
      scale: factor of x.
      softcap: bound of the scaled x (Gemma 2: 50 for attention), or None for none.
      axis: the dim to sum over.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: `mask` is not bool or does not broadcast to x.
      ValueError: `softcap` is not a positive finite number.

    Example:
      >>> x = jnp.array([1.0, 2.0, 3.0])
      >>> jaxkern.softmax(x)
      Array([0.09 , 0.245, 0.665], dtype=float32)
      >>> jaxkern.softmax(x, jnp.array([True, True, False]))
      Array([0.269, 0.731, 0.   ], dtype=float32)
      >>> jaxkern.softmax(x, x > 9)  # nothing is kept: no NaN
      Array([0., 0., 0.], dtype=float32)
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"softmax: `softcap` must be positive and finite, got {softcap}. "
            "None means no cap."
        )
    axis = axis_within("softmax", axis, x.ndim)
    if mask is not None:
        mask = broadcast_mask(mask, x.shape)
        mask = jnp.moveaxis(mask, axis, -1)
    rows = jnp.moveaxis(x, axis, -1)
    if softcap is None:
        y = softmax_p(rows, mask, scale=float(scale))
    else:
        cap = float(softcap)
        y = softcap_softmax_p(rows, mask, scale=float(scale), softcap=cap)
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
    return normalised(at_least_f32(x) * scale, mask, x.dtype)


def normalised(
    z: Float[Array, "... s"], mask: Bool[Array, "... s"] | None, dtype: jnp.dtype
) -> Float[Array, "... s"]:
    """exp(z) over its sum, of what is kept."""
    if mask is not None:
        z = jnp.where(mask, z, -jnp.inf)
    top = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True, initial=-jnp.inf))
    weight = jnp.exp(z - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return (weight / jnp.where(total == 0, 1, total)).astype(dtype)


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


def softcap_softmax_reference(
    x: Float[Array, "... s"],
    mask: Bool[Array, "... s"] | None,
    *,
    scale: float,
    softcap: float,
) -> Float[Array, "... s"]:
    u = at_least_f32(x) * (scale / softcap)
    if mask is not None:
        u = jnp.where(mask, u, 0)  # a NaN that is hidden has no gradient either
    return normalised(softcap * jnp.tanh(u), mask, x.dtype)


def softcap_softmax_bwd_reference(
    x: Float[Array, "... s"],
    y: Float[Array, "... s"],
    dy: Float[Array, "... s"],
    *,
    scale: float,
    softcap: float,
) -> Float[Array, "... s"]:
    y32, dy32 = at_least_f32(y), at_least_f32(dy)
    mean = jnp.sum(y32 * dy32, axis=-1, keepdims=True)
    # 1 - tanh(u)**2 = 4 sigmoid(2 u) sigmoid(-2 u); what is hidden may be NaN
    u2 = jnp.where(y == 0, 0, at_least_f32(x) * (2 * scale / softcap))
    slope = 4 * scale * jax.nn.sigmoid(u2) * jax.nn.sigmoid(-u2)
    return (slope * y32 * (dy32 - mean)).astype(x.dtype)


softcap_softmax_p = kernel_primitive(
    softcap_softmax_reference,
    bwd=softcap_softmax_bwd_reference,
    replicated=("s",),
)
