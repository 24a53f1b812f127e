"""Frequency and presence penalties: logits fall with the counts of their tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.sampling.cut_logits import per_row


@check_arguments
def apply_frequency_penalty(
    logits: Float[Array, "... v"],
    counts: Integer[Array, "... v"],
    *,
    frequency: Float[Array, "..."] | float = 0.0,
    presence: Float[Array, "..."] | float = 0.0,
) -> Float[Array, "... v"]:
    """Makes tokens less likely by how often they occurred (OpenAI's API reference).

        y = logits - frequency * counts - presence * (counts > 0)

    Negative penalties make them likelier. Differentiable in logits and both penalties;
    infinite logits stay, NaN propagates. Computed in float32 and rounded once.

        counts = counts.at[jnp.arange(b), token].add(1)  # after each token
        y = apply_frequency_penalty(logits, counts, frequency=0.5, presence=0.2)

    Args:
      logits: `[..., v]`, any float dtype.
      counts: `[..., v]`, any integer dtype: how often each token occurred so far.
      frequency: scalar or one per row, may be traced.
      presence: scalar or one per row, may be traced.

    Returns:
      y: shape and dtype of logits.

    Raises:
      TypeError: shapes or dtypes do not fit.

    Example:
      >>> logits, counts = jnp.array([1.0, 1.0, 1.0]), jnp.array([0, 1, 3])
      >>> jaxkern.apply_frequency_penalty(logits, counts, frequency=0.5, presence=0.25)
      Array([ 1.  ,  0.25, -0.75], dtype=float32)
    """
    rows = logits.shape[:-1]
    op = "apply_frequency_penalty"
    return frequency_penalty_p(
        logits,
        counts,
        per_row(op, "frequency", frequency, rows, jnp.float32),
        per_row(op, "presence", presence, rows, jnp.float32),
    )


def frequency_penalty_reference(
    logits: Float[Array, "... v"],
    counts: Integer[Array, "... v"],
    frequency: Float[Array, "..."],
    presence: Float[Array, "..."],
) -> Float[Array, "... v"]:
    x = at_least_f32(logits)
    fall = at_least_f32(frequency)[..., None] * counts.astype(x.dtype)
    fall = fall + jnp.where(counts > 0, at_least_f32(presence)[..., None], 0)
    return (x - fall).astype(logits.dtype)


frequency_penalty_p = kernel_primitive(frequency_penalty_reference)
