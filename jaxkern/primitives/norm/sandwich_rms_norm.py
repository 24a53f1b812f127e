"""total = residual + rms_norm(x) * w, y = rms_norm(total) * v  (https://arxiv.org/abs/2105.13290)."""

import jax

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.multi_rms_norm import (
    Rows,
    Rstd,
    Weight,
    gradients_of_each,
    normed_by_each,
)
from jaxkern.primitives.norm.rms_norm import (
    rms_norm_bwd_reference,
    rms_norm_fwd_reference,
)


@check_arguments
def sandwich_rms_norm(
    x: Rows,
    residual: Rows,
    weight: Weight,
    *next_weights: Weight,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Rows, ...]:
    """The seam between two blocks that have a norm before and after (Gemma 2, 3, 4).

        total = residual + x / sqrt(mean(x**2) + eps) * (weight + offset)
        y_i   = total / sqrt(mean(total**2) + eps) * (next_weight_i + offset)

    `rms_norm_add`, then `rms_norm`, or `multi_rms_norm` where the next layer reads the
    sum with three norms. The sum stays in float32 (float64 for float64 operands) until
    both norms are done; each result is rounded once.

    Source: https://arxiv.org/abs/2105.13290.

    Args:
      x: `[..., d]`, any float dtype: what the block gives.
      residual: `[..., d]`, any float dtype.
      weight: `[d]`, of the norm after the block, or None for no scale.
      next_weights: one or three, of the norms before the next block, `[d]` or None.
      eps: added to both mean squares, in units of x**2.
      offset: added to each weight; 1.0 for Gemma 2 and 3, which store weight - 1.

    Returns:
      y_1, ...: `[..., d]` for each next weight, dtype of x.
      total: `[..., d]`, dtype of residual.

    Raises:
      TypeError: another number of weights, a dtype is not a float, or a dim differs.
      ValueError: eps is negative or not finite.

    Example:
      >>> x, residual = jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 1.0]])
      >>> ones = jnp.ones(2)
      >>> y, total = jaxkern.sandwich_rms_norm(x, residual, ones, ones)
      >>> total  # rms_norm_add
      Array([[1.849, 2.131]], dtype=float32)
      >>> y  # what the next block reads
      Array([[0.927, 1.068]], dtype=float32)
    """
    arity = {1: sandwich_rms_norm_p, 3: sandwich_triple_rms_norm_p}
    if len(next_weights) not in arity:
        raise TypeError(
            f"sandwich_rms_norm: takes 1 or 3 weights of the next norms, got "
            f"{len(next_weights)}. Pass None for no scale, or call rms_norm_add first."
        )
    p = arity[len(next_weights)]
    return p(x, residual, weight, *next_weights, eps=eps, offset=offset)


def summed(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None,
    eps: float,
    offset: float,
) -> tuple[jax.Array, jax.Array]:
    """The sum, at least float32, and rstd of x."""
    normed, rstd = rms_norm_fwd_reference(
        at_least_f32(x), weight, None, eps=eps, offset=offset
    )
    return at_least_f32(residual) + normed, rstd


def sandwich_rms_norm_fwd_reference(
    x: Rows,
    residual: Rows,
    weight: Weight,
    next_weight: Weight,
    *,
    eps: float,
    offset: float,
) -> tuple[Rows, Rows, Rstd, Rstd]:
    total, rstd = summed(x, residual, weight, eps, offset)
    (y,), next_rstd = normed_by_each(total, (next_weight,), eps, offset)
    return y.astype(x.dtype), total.astype(residual.dtype), rstd, next_rstd


sandwich_rms_norm_reference = without_residuals(sandwich_rms_norm_fwd_reference, 2)


def sandwich_rms_norm_bwd_reference(
    x: Rows,
    residual: Rows,
    weight: Weight,
    next_weight: Weight,
    rstd: Rstd,
    next_rstd: Rstd,
    dy: Rows,
    dtotal: Rows,
    *,
    eps: float,
    offset: float,
) -> tuple[Rows, Rows, Weight, Weight]:
    total, _ = summed(x, residual, weight, eps, offset)
    through, (dnext_weight,) = gradients_of_each(
        total, (next_weight,), next_rstd, (dy,), offset
    )
    dsum = at_least_f32(dtotal) + through
    dx, dweight, _ = rms_norm_bwd_reference(
        x, weight, None, rstd, dsum, eps=eps, offset=offset
    )
    return dx, dsum.astype(residual.dtype), dweight, dnext_weight


def sandwich_triple_rms_norm_fwd_reference(
    x: Rows,
    residual: Rows,
    weight: Weight,
    next_weight1: Weight,
    next_weight2: Weight,
    next_weight3: Weight,
    *,
    eps: float,
    offset: float,
) -> tuple[Rows, Rows, Rows, Rows, Rstd, Rstd]:
    total, rstd = summed(x, residual, weight, eps, offset)
    next_weights = next_weight1, next_weight2, next_weight3
    ys, next_rstd = normed_by_each(total, next_weights, eps, offset)
    y1, y2, y3 = (y.astype(x.dtype) for y in ys)
    return y1, y2, y3, total.astype(residual.dtype), rstd, next_rstd


sandwich_triple_rms_norm_reference = without_residuals(
    sandwich_triple_rms_norm_fwd_reference, 4
)


def sandwich_triple_rms_norm_bwd_reference(
    x: Rows,
    residual: Rows,
    weight: Weight,
    next_weight1: Weight,
    next_weight2: Weight,
    next_weight3: Weight,
    rstd: Rstd,
    next_rstd: Rstd,
    dy1: Rows,
    dy2: Rows,
    dy3: Rows,
    dtotal: Rows,
    *,
    eps: float,
    offset: float,
) -> tuple[Rows, Rows, Weight, Weight, Weight, Weight]:
    total, _ = summed(x, residual, weight, eps, offset)
    through, (dnext1, dnext2, dnext3) = gradients_of_each(
        total,
        (next_weight1, next_weight2, next_weight3),
        next_rstd,
        (dy1, dy2, dy3),
        offset,
    )
    dsum = at_least_f32(dtotal) + through
    dx, dweight, _ = rms_norm_bwd_reference(
        x, weight, None, rstd, dsum, eps=eps, offset=offset
    )
    return dx, dsum.astype(residual.dtype), dweight, dnext1, dnext2, dnext3


sandwich_rms_norm_p = kernel_primitive(
    sandwich_rms_norm_reference,
    fwd=sandwich_rms_norm_fwd_reference,
    bwd=sandwich_rms_norm_bwd_reference,
    replicated=("d",),  # the means run over d: each device needs all of it
)
sandwich_triple_rms_norm_p = kernel_primitive(
    sandwich_triple_rms_norm_reference,
    fwd=sandwich_triple_rms_norm_fwd_reference,
    bwd=sandwich_triple_rms_norm_bwd_reference,
    replicated=("d",),  # the means run over d: each device needs all of it
)
