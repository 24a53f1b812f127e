"""Repetition penalty: logits of seen tokens move towards less likely  (https://arxiv.org/abs/1909.05858)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def apply_repetition_penalty(
    logits: Float[Array, "... v"],
    token_ids: Integer[Array, "... t"],
    penalty: Float[Array, "..."] | float,
    *,
    mask: Bool[Array, "... t"] | None = None,
) -> Float[Array, "... v"]:
    """Makes the tokens seen so far less likely (CTRL, https://arxiv.org/abs/1909.05858).

        y = logits / penalty  where logits > 0,  logits * penalty  elsewhere

    for each token that occurs in its row of `token_ids`, once however often it occurs;
    other logits stay. (The paper divides negative logits too, which would make them
    likelier; this is the form of Hugging Face and llama.cpp.) Infinite logits stay, NaN
    propagates.

    Args:
      logits: `[..., v]`, any float dtype.
      token_ids: `[..., t]`, any integer dtype. Ids outside [0, v) are padding.
      penalty: scalar or one per row, positive; 1 changes nothing.
      mask: `[..., t]`, False where `token_ids` is padding.

    Returns:
      y: shape and dtype of logits.

    Raises:
      TypeError: shapes do not fit.
      ValueError: `penalty` is a number that is not positive.

    Example:
      >>> logits, seen = jnp.array([2.0, -2.0, 2.0]), jnp.array([0, 1, 1])
      >>> jaxkern.apply_repetition_penalty(logits, seen, 2.0)
      Array([ 1., -4.,  2.], dtype=float32)
    """
    if isinstance(penalty, int | float) and not penalty > 0:
        raise ValueError(
            f"apply_repetition_penalty: `penalty` must be positive, got {penalty}."
        )
    penalty = jnp.asarray(penalty, jnp.float32)
    if penalty.ndim == 0:
        penalty = jnp.broadcast_to(penalty, logits.shape[:-1])
    return repetition_penalty_p(logits, token_ids, penalty, mask)


def repetition_penalty_reference(
    logits: Float[Array, "... v"],
    token_ids: Integer[Array, "... t"],
    penalty: Float[Array, "..."],
    mask: Bool[Array, "... t"] | None,
) -> Float[Array, "... v"]:
    v = logits.shape[-1]
    x, factor = at_least_f32(logits), at_least_f32(penalty)[..., None]
    if token_ids.dtype.itemsize < 4:
        token_ids = token_ids.astype(jnp.int32)  # v may not fit its dtype
    counts = (token_ids >= 0) & (token_ids < v)
    if mask is not None:
        counts = counts & mask
    mark = jnp.vectorize(
        lambda row, ids: row.at[ids].set(True, mode="clip"), signature="(v),(t)->(v)"
    )
    # one place more for the ids that do not count: no index lies outside
    places = jnp.pad(jnp.zeros_like(logits, bool), [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    seen = mark(places, jnp.where(counts, token_ids, v))[..., :v]
    # an infinite logit has no finite derivative in penalty: keep it out
    changes = seen & jnp.isfinite(x)
    z = jnp.where(changes, x, 0)
    return jnp.where(changes, jnp.where(z > 0, z / factor, z * factor), x).astype(
        logits.dtype
    )


repetition_penalty_p = kernel_primitive(
    repetition_penalty_reference,
    replicated=("v", "t"),  # any token of t may ask for any of v
)
