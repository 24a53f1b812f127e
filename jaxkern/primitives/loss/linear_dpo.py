"""Preference losses of log-probabilities that are made without logits.

Direct preference optimisation: https://arxiv.org/abs/2305.18290.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.loss.cross_entropy import as_class, is_counted
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy


@check_arguments
def linear_log_probs(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    labels: Integer[Array, "..."],
    *,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    block_size: int | None = None,
) -> Float[Array, "..."]:
    """Log-probability of each label under the softmax of x weight^T.

        y = z[label] - ln(sum_j exp(z_j)), z = x weight^T

    The negative of `linear_cross_entropy`: by blocks of the vocabulary, forward and
    backward, so that no more than `[..., block_size]` logits are in memory.

    Source: https://arxiv.org/abs/2305.18290.

    Args:
      x: `[..., d]`, any float dtype: the last hidden states.
      weight: `[v, d]`, a row per class.
      labels: `[...]`, any integer dtype; a label outside [0, v) gives NaN.
      softcap: Gemma 2's cap of the logits; None for no cap.
      ignore_index: the label of tokens that count nothing: 0, with zero gradient.
      block_size: how many classes at once; None as in `linear_cross_entropy`.

    Returns:
      y: `[...]`, float32, at most 0.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an option out of range.

    Example:
      >>> x = jnp.array([[1.0, 0.0]])
      >>> weight = jnp.array([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
      >>> jaxkern.linear_log_probs(x, weight, jnp.array([0]))
      Array([-0.408], dtype=float32)
    """
    loss = linear_cross_entropy(
        x,
        weight,
        labels,
        softcap=softcap,
        ignore_index=ignore_index,
        return_lse=True,
        block_size=block_size,
    )[0]
    return -loss


@check_arguments
def linear_dpo(
    x: Float[Array, "2 b t d"],
    weight: Float[Array, "v d"],
    labels: Integer[Array, "2 b t"],
    reference_log_probs: Float[Array, "2 b"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    average: bool = False,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    block_size: int | None = None,
) -> tuple[Float[Array, " b"], Float[Array, "2 b"]]:
    """Direct preference optimisation of pairs: a chosen answer and a rejected one.

        y[i, b]    = sum over t of log softmax(x[i, b, t] weight^T)[labels[i, b, t]]
        reward     = beta * (y - reference_log_probs)
        margin     = reward[0] - reward[1]
        loss       = -(1 - e) ln sigmoid(margin) - e ln sigmoid(-margin)

    with e = label_smoothing, the share of pairs whose order is thought to be wrong
    (conservative DPO). Answer 0 is the chosen one. Both go through one pass over the
    vocabulary, block by block; gradients to `x`, `weight` and `reference_log_probs`.

    Source: https://arxiv.org/abs/2305.18290.

    Args:
      x: `[2, b, t, d]`, any float dtype: the last hidden states of the policy.
      weight: `[v, d]`, a row per class.
      labels: `[2, b, t]`, any integer dtype; prompt and padding have `ignore_index`.
      reference_log_probs: `[2, b]`, y of the frozen model: `linear_log_probs(...)`,
        summed over t (its mean over the counted tokens with `average`).
      beta: how far the policy may leave the reference, positive.
      label_smoothing: e, in [0, 1/2).
      average: y is the mean over the counted tokens instead of the sum.
      softcap, ignore_index, block_size: see `linear_log_probs`.

    Returns:
      loss: `[b]`, float32.
      reward: `[2, b]`, float32; `reward[0] > reward[1]` where the policy is right.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an option out of range.

    Example:
      >>> weight = jnp.array([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
      >>> x = jnp.ones((2, 1, 1, 2))  # a pair of answers of one token
      >>> labels = jnp.array([0, 1]).reshape(2, 1, 1)
      >>> loss, reward = jaxkern.linear_dpo(x, weight, labels, jnp.full((2, 1), -1.0))
      >>> loss, reward[0] > reward[1]
      (Array([0.644], dtype=float32), Array([ True], dtype=bool))
    """
    if not 0 < beta < math.inf:
        raise ValueError(f"linear_dpo: `beta` must be positive and finite, got {beta}.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            "linear_dpo: `label_smoothing` must lie in [0, 0.5), got "
            f"{label_smoothing}: at one half the order of a pair says nothing."
        )
    if x.ndim != 4 or x.shape[0] != 2 or reference_log_probs.shape != x.shape[:2]:
        raise TypeError(
            "linear_dpo: `x` must be [2, b, t, d], `reference_log_probs` [2, b], got "
            f"{x.shape} and {reference_log_probs.shape}."
        )
    each = linear_log_probs(
        x,
        weight,
        labels,
        softcap=softcap,
        ignore_index=ignore_index,
        block_size=block_size,
    )
    y = jnp.sum(each, axis=-1)
    if average:
        counted = jnp.sum(is_counted(as_class(labels), ignore_index), axis=-1)
        y = y / jnp.maximum(counted, 1).astype(y.dtype)
    reward = beta * (y - reference_log_probs.astype(y.dtype))
    margin = reward[0] - reward[1]
    loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin)
    if label_smoothing:
        loss = loss - label_smoothing * jax.nn.log_sigmoid(-margin)
    return loss, reward
