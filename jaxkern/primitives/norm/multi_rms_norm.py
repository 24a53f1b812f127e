"""y_i = rms_norm(x) * weight_i: one row, several weights  (https://arxiv.org/abs/1910.07467)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.rms_norm import (
    rms_norm_bwd_reference,
    rms_norm_fwd_reference,
)

Rows = Float[Array, "... d"]
Weight = Float[Array, " d"] | None
Rstd = Float[Array, "... 1"]


@check_arguments
def multi_rms_norm(
    x: Rows, *weights: Weight, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Rows, ...]:
    """Normalises x once for two or three readers that have weights of their own.

        y_i = x / sqrt(mean(x**2) + eps) * (weight_i + offset)

    Gemma 4 reads one residual stream with its dense block, its experts and its router.
    x is read once and its mean square is taken once, forward and backward. Computed in
    float32 (float64 for a float64 `x`); each result is rounded once.

    Source: https://arxiv.org/abs/1910.07467.

    Args:
      x: `[..., d]`, any float dtype.
      weights: two or three, each `[d]`, or None for no scale.
      eps: added to the mean square, in units of x**2.
      offset: added to each weight; 1.0 for Gemma 2 and 3, which store weight - 1.

    Returns:
      y_1, y_2, ...: `[..., d]` for each weight, dtype of x.

    Raises:
      TypeError: another number of weights, a dtype is not a float, or a dim differs.
      ValueError: eps is negative or not finite.

    Example:
      >>> x, w = jnp.array([[3.0, 4.0]]), jnp.array([1.0, 10.0])
      >>> for_experts, for_router = jaxkern.multi_rms_norm(x, w, None)
      >>> for_experts, for_router
      (Array([[ 0.849, 11.314]], dtype=float32), Array([[0.849, 1.131]], dtype=float32))
    """
    arity = {2: dual_rms_norm_p, 3: triple_rms_norm_p}
    if len(weights) not in arity:
        raise TypeError(
            f"multi_rms_norm: takes 2 or 3 weights, got {len(weights)}. Call it again "
            "for more, or rms_norm for one."
        )
    return arity[len(weights)](x, *weights, eps=eps, offset=offset)


def normed_by_each(
    x: jax.Array, weights: Sequence[jax.Array | None], eps: float, offset: float
) -> tuple[list[jax.Array], jax.Array]:
    """The norm of x times each weight, at least float32, and rstd."""
    x32 = at_least_f32(x)
    xhat, rstd = rms_norm_fwd_reference(x32, None, None, eps=eps, offset=offset)
    return [
        xhat if w is None else xhat * (at_least_f32(w) + offset) for w in weights
    ], rstd


def gradients_of_each(
    x: jax.Array,
    weights: Sequence[jax.Array | None],
    rstd: jax.Array,
    dys: Sequence[jax.Array],
    offset: float,
) -> tuple[jax.Array, list[jax.Array | None]]:
    """dx in x.dtype and the weights' gradients of `normed_by_each`."""
    xhat, rows = at_least_f32(x) * rstd, tuple(range(x.ndim - 1))
    dxhat, dweights = jnp.zeros_like(xhat), []
    for weight, dy in zip(weights, map(at_least_f32, dys), strict=True):
        if weight is None:
            dxhat = dxhat + dy
            dweights.append(None)
        else:
            dxhat = dxhat + dy * (at_least_f32(weight) + offset)
            dweights.append((dy * xhat).sum(rows).astype(weight.dtype))
    dx, _, _ = rms_norm_bwd_reference(x, None, None, rstd, dxhat, eps=0.0, offset=0.0)
    return dx, dweights


def dual_rms_norm_fwd_reference(
    x: Rows, weight1: Weight, weight2: Weight, *, eps: float, offset: float
) -> tuple[Rows, Rows, Rstd]:
    (y1, y2), rstd = normed_by_each(x, (weight1, weight2), eps, offset)
    return y1.astype(x.dtype), y2.astype(x.dtype), rstd


dual_rms_norm_reference = without_residuals(dual_rms_norm_fwd_reference, 2)


def dual_rms_norm_bwd_reference(
    x: Rows,
    weight1: Weight,
    weight2: Weight,
    rstd: Rstd,
    dy1: Rows,
    dy2: Rows,
    *,
    eps: float,
    offset: float,
) -> tuple[Rows, Weight, Weight]:
    del eps  # already in rstd
    dx, (dweight1, dweight2) = gradients_of_each(
        x, (weight1, weight2), rstd, (dy1, dy2), offset
    )
    return dx, dweight1, dweight2


def triple_rms_norm_fwd_reference(
    x: Rows,
    weight1: Weight,
    weight2: Weight,
    weight3: Weight,
    *,
    eps: float,
    offset: float,
) -> tuple[Rows, Rows, Rows, Rstd]:
    ys, rstd = normed_by_each(x, (weight1, weight2, weight3), eps, offset)
    y1, y2, y3 = (y.astype(x.dtype) for y in ys)
    return y1, y2, y3, rstd


triple_rms_norm_reference = without_residuals(triple_rms_norm_fwd_reference, 3)


def triple_rms_norm_bwd_reference(
    x: Rows,
    weight1: Weight,
    weight2: Weight,
    weight3: Weight,
    rstd: Rstd,
    dy1: Rows,
    dy2: Rows,
    dy3: Rows,
    *,
    eps: float,
    offset: float,
) -> tuple[Rows, Weight, Weight, Weight]:
    del eps  # already in rstd
    dx, (dweight1, dweight2, dweight3) = gradients_of_each(
        x, (weight1, weight2, weight3), rstd, (dy1, dy2, dy3), offset
    )
    return dx, dweight1, dweight2, dweight3


dual_rms_norm_p = kernel_primitive(
    dual_rms_norm_reference,
    fwd=dual_rms_norm_fwd_reference,
    bwd=dual_rms_norm_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
triple_rms_norm_p = kernel_primitive(
    triple_rms_norm_reference,
    fwd=triple_rms_norm_fwd_reference,
    bwd=triple_rms_norm_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
