"""y = residual + rms_norm(sum of the experts' outputs)  (https://arxiv.org/abs/1910.07467)."""

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


@check_arguments
def moe_rms_norm_add(
    expert_out: Float[Array, "... e d"],
    expert_weights: Float[Array, "... e"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    residual_weight: Float[Array, " d"] | None = None,
    *,
    normalize_residual: bool = False,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Float[Array, "... d"]:
    """Combines the chosen experts of each token, normalises, adds the residual.

        mixed = sum_e expert_weights_e expert_out_e
        y = residual + norm(mixed) * (weight + offset)
        y = norm(residual) * (residual_weight + offset)
            + norm(mixed) * (weight + offset)                   normalize_residual

    with norm(u) = u / sqrt(mean(u**2) + eps). In Gemma 4 the second form joins the
    dense feed-forward block (`residual`) and the experts. Computed in float32 (float64
    for float64 operands) and rounded once.

    Source: https://arxiv.org/abs/1910.07467.

    Args:
      expert_out: `[..., e, d]`, any float dtype: of the e experts that each token
        has chosen, not of all.
      expert_weights: `[..., e]`, the router's.
      residual: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale.
      residual_weight: `[d]`, or None for no scale; only with normalize_residual.
      normalize_residual: whether the residual is normalised too.
      eps: added to the mean squares, in units of x**2.
      offset: added to the weights; 1.0 for checkpoints that store weight - 1.

    Returns:
      y: `[..., d]`, dtype of residual.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: a residual_weight without normalize_residual, or
        an eps that is negative or not finite.

    Example:
      >>> experts = jnp.array([[[3.0, 4.0], [1.0, 0.0]]])  # one token, two experts
      >>> weights, residual = jnp.array([[0.75, 0.25]]), jnp.array([[1.0, 1.0]])
      >>> jaxkern.moe_rms_norm_add(experts, weights, residual)
      Array([[1.905, 2.086]], dtype=float32)
    """
    if residual_weight is not None and not normalize_residual:
        raise ValueError(
            "moe_rms_norm_add: residual_weight scales a norm. Pass "
            "normalize_residual=True, or leave it out."
        )
    return moe_rms_norm_add_p(
        expert_out,
        expert_weights,
        residual,
        weight,
        residual_weight,
        normalize_residual=bool(normalize_residual),
        eps=eps,
        offset=offset,
    )


def mix(expert_out: jax.Array, expert_weights: jax.Array) -> jax.Array:
    weights = at_least_f32(expert_weights)[..., None]
    return jnp.sum(weights * at_least_f32(expert_out), axis=-2)


def moe_rms_norm_add_fwd_reference(
    expert_out: Float[Array, "... e d"],
    expert_weights: Float[Array, "... e"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    residual_weight: Float[Array, " d"] | None,
    *,
    normalize_residual: bool,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... 1"], Float[Array, "... 1"]]:
    mixed = mix(expert_out, expert_weights)
    normed, rstd = rms_norm_fwd_reference(mixed, weight, None, eps=eps, offset=offset)
    added, residual_rstd = at_least_f32(residual), jnp.ones_like(rstd)
    if normalize_residual:
        added, residual_rstd = rms_norm_fwd_reference(
            added, residual_weight, None, eps=eps, offset=offset
        )
    return (added + normed).astype(residual.dtype), rstd, residual_rstd


moe_rms_norm_add_reference = without_residuals(moe_rms_norm_add_fwd_reference)


def moe_rms_norm_add_bwd_reference(
    expert_out: Float[Array, "... e d"],
    expert_weights: Float[Array, "... e"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    residual_weight: Float[Array, " d"] | None,
    rstd: Float[Array, "... 1"],
    residual_rstd: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    *,
    normalize_residual: bool,
    eps: float,
    offset: float,
) -> tuple[
    Float[Array, "... e d"],
    Float[Array, "... e"],
    Float[Array, "... d"],
    Float[Array, " d"] | None,
    Float[Array, " d"] | None,
]:
    mixed = mix(expert_out, expert_weights)
    dmixed, dweight, _ = rms_norm_bwd_reference(
        mixed, weight, None, rstd, dy, eps=eps, offset=offset
    )
    dmixed = dmixed[..., None, :]
    doutputs = at_least_f32(expert_weights)[..., None] * dmixed
    dexperts = jnp.sum(at_least_f32(expert_out) * dmixed, axis=-1)
    dresidual, dresidual_weight = dy, None
    if normalize_residual:
        dresidual, dresidual_weight, _ = rms_norm_bwd_reference(
            residual, residual_weight, None, residual_rstd, dy, eps=eps, offset=offset
        )
    return (
        doutputs.astype(expert_out.dtype),
        dexperts.astype(expert_weights.dtype),
        dresidual,
        dweight,
        dresidual_weight,
    )


moe_rms_norm_add_p = kernel_primitive(
    moe_rms_norm_add_reference,
    fwd=moe_rms_norm_add_fwd_reference,
    bwd=moe_rms_norm_add_bwd_reference,
    replicated=("d", "e"),  # the norm is of the sum over e, and its mean runs over d
)
