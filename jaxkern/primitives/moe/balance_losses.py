"""Auxiliary losses of a router: balance of the load, size of the logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32


@check_arguments
def load_balance_loss(
    logits: Float[Array, "... t e"],
    ids: Integer[Array, "... t k"],
    *,
    score: str = "softmax",
    where: Bool[Array, "... t"] | None = None,
) -> Float[Array, ""]:
    """How unevenly the tokens of each sequence load the experts; 1 if evenly.

        load[e] = share of the t * k slots that went to e           (no gradient)
        mass[e] = mean over t of s[t, e] / sum_e s[t, e]
        loss    = mean over the leading dims of  e * sum_e load[e] * mass[e]

    Leading dims are balanced apart: flatten to `[t, e]` for the batch-wise loss of
    Switch and GShard (https://arxiv.org/abs/2101.03961, eq. 4), keep `[b, t, e]` with
    `score="sigmoid"` for the sequence-wise one of DeepSeek-V3
    (https://arxiv.org/abs/2412.19437, eq. 17). Hugging Face's is k times this one.

    Args:
      logits: `[..., t, e]`, of the router.
      ids: `[..., t, k]`, the chosen experts.
      score: s is the "softmax" or the "sigmoid" of the logits.
      where: `[..., t]`, False for padding; a sequence without tokens counts as 0.

    Returns:
      loss: scalar, float32 (float64 for float64 logits).

    Raises:
      ValueError: `score` is neither of the two.

    Example:
      >>> logits, ids = jnp.zeros((4, 2)), jnp.array([[0], [1], [0], [1]])
      >>> jaxkern.load_balance_loss(logits, ids)  # evenly
      Array(1., dtype=float32)
      >>> jaxkern.load_balance_loss(logits + jnp.array([9.0, 0.0]), ids * 0)
      Array(2., dtype=float32)
    """
    if score not in ("softmax", "sigmoid"):
        raise ValueError(
            f"load_balance_loss: `score` must be 'softmax' or 'sigmoid', got {score!r}."
        )
    e, k = logits.shape[-1], ids.shape[-1]
    logits = at_least_f32(logits)
    share = jax.nn.softmax(
        logits if score == "softmax" else jax.nn.log_sigmoid(logits), axis=-1
    )
    chosen = jax.nn.one_hot(ids, e, dtype=logits.dtype).sum(axis=-2) / max(k, 1)
    load, mass = token_mean(chosen, where), token_mean(share, where)
    return jnp.mean(e * (load * mass).sum(axis=-1))


@check_arguments
def router_z_loss(
    logits: Float[Array, "... e"], *, where: Bool[Array, "..."] | None = None
) -> Float[Array, ""]:
    """Mean of logsumexp(logits)**2, which keeps logits small.

    ST-MoE, https://arxiv.org/abs/2202.08906, eq. 5.

    Args:
      logits: `[..., e]`, of the router.
      where: `[...]`, False for padding.

    Returns:
      loss: scalar, float32 (float64 for float64 logits); 0 without tokens.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> jaxkern.router_z_loss(jnp.zeros((4, 2)))  # ln(2)**2
      Array(0.48, dtype=float32)
    """
    square = jax.nn.logsumexp(at_least_f32(logits), axis=-1) ** 2
    every = None if where is None else where.reshape(-1)
    return token_mean(square.reshape(-1, 1), every)[0]


def token_mean(
    x: Float[Array, "... t e"], where: Bool[Array, "... t"] | None
) -> Float[Array, "... e"]:
    """Mean over the tokens that count; 0 if none does."""
    if where is None:
        return x.sum(axis=-2) / max(x.shape[-2], 1)
    count = where.sum(axis=-1, keepdims=True)
    return jnp.where(where[..., None], x, 0).sum(axis=-2) / jnp.maximum(count, 1)
