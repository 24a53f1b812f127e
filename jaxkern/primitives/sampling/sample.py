"""Sampling a token from softmax(logits / temperature), after the cuts of cut_logits."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32, PRNGKeyArray

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.argmax import argmax, argmax_reference, first_true
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.sampling.cut_logits import (
    after_cuts,
    check_cuts,
    column,
    kept_tokens,
    per_row,
    relative_weights,
)


@check_arguments
def sample(
    logits: Float[Array, "... v"],
    key: PRNGKeyArray,
    *,
    temperature: Float[Array, "..."] | float = 1.0,
    top_k: Int[Array, "..."] | int | None = None,
    top_p: Float[Array, "..."] | float | None = None,
    min_p: Float[Array, "..."] | float | None = None,
    typical_p: Float[Array, "..."] | float | None = None,
    epsilon: Float[Array, "..."] | float | None = None,
    eta: Float[Array, "..."] | float | None = None,
) -> Int32[Array, "..."]:
    """One token id per row, drawn from softmax(logits / temperature) after its cuts.

    With p = softmax(logits / temperature), in this order (that of Hugging Face;
    llama.cpp makes the same cuts but applies the temperature last):

        top_k   keeps the tokens whose logit is not below the k-th largest
        top_p   keeps the smallest set of likeliest tokens whose share of what is left
                reaches top_p: the token that crosses it is kept, and one at least
        min_p   keeps the tokens with p >= min_p * max(p)

    Then those by `typical_p`, `epsilon` and `eta`, whose formulas stand in
    `cut_logits`: with one of these the logits are cut first, by a reference, and the
    kernels draw from what is left.

    Tokens that tie with the last one kept are kept too, by each cut: no cut depends on
    the order of the vocabulary. Then u is drawn uniformly from [0, 1) and the result is
    the first token, in the order of the vocabulary, whose cumulative probability
    exceeds u. A token of probability zero is never drawn.

    The cuts need no sort: a bisection on the bits of float32 finds each threshold
    exactly in 32 passes over the row. Each row has its own u and does not depend on the
    others. Arithmetic in float32.

    NaN logits count as -inf. A row without a token above -inf gives 0, one with +inf
    draws among its +inf. The result has no gradient.

    Source: https://arxiv.org/abs/1904.09751, https://arxiv.org/abs/2407.01082.

    Args:
      logits: `[..., v]`, any float dtype.
      key: a PRNG key, used once.
      temperature: scalar or one per row. 0 or less: the likeliest token, the smallest
        id on ties. inf: uniform among the tokens that are kept.
      top_k: scalar or one per row, traced or not. None, 0 or less: no cut.
      top_p: scalar or one per row, in [0, 1]. None or 1: no cut.
      min_p: scalar or one per row, in [0, 1]. None or 0: no cut.
      typical_p: scalar or one per row, in [0, 1]. None or 1: no cut.
      epsilon, eta: scalar or one per row, in [0, 1]. None or 0: no cut.

    Returns:
      ids: int32, `[...]`.

    Raises:
      TypeError: `key` is no key, or an option does not broadcast to the rows.
      ValueError: v is 0, a share is a number outside [0, 1], or temperature is NaN.

    Example:
      >>> logits = jnp.array([[2.0, 1.0, 0.0], [0.0, 9.0, 0.0]])
      >>> jaxkern.sample(logits, jax.random.key(0), temperature=0)  # the likeliest
      Array([0, 1], dtype=int32)
      >>> jaxkern.sample(logits, jax.random.key(0), top_k=1)  # likewise
      Array([0, 1], dtype=int32)
      >>> jaxkern.sample(logits, jax.random.key(0), top_p=0.9).shape
      (2,)
    """
    rows = logits.shape[:-1]
    check_cuts("sample", temperature, (top_p, min_p, typical_p, epsilon, eta))
    if isinstance(temperature, int | float) and temperature <= 0:
        return argmax(logits, nan_policy="ignore")
    if any(cut is not None for cut in (typical_p, epsilon, eta)):
        cuts = (top_k, top_p, min_p, typical_p, epsilon, eta)
        kept = kept_tokens("sample", logits, temperature, *cuts)
        logits = jnp.where(kept, logits, -jnp.inf)
        top_k = top_p = min_p = None
    uniform = jax.random.uniform(key, rows, jnp.float32)
    return sample_at(logits, uniform, temperature, top_k, top_p, min_p)


def sample_at(
    logits: Float[Array, "... v"],
    uniform: Float[Array, "..."],
    temperature: Float[Array, "..."] | float,
    top_k: Int[Array, "..."] | int | None,
    top_p: Float[Array, "..."] | float | None,
    min_p: Float[Array, "..."] | float | None,
) -> Int32[Array, "..."]:
    """`sample`, of temperatures above 0 where they are numbers, with u given."""
    rows = logits.shape[:-1]
    return sample_p(
        logits,
        uniform,
        per_row("sample", "temperature", temperature, rows, jnp.float32),
        per_row("sample", "top_k", top_k, rows, jnp.int32),
        per_row("sample", "top_p", top_p, rows, jnp.float32),
        per_row("sample", "min_p", min_p, rows, jnp.float32),
    )


def sample_reference(
    logits: Float[Array, "... v"],
    uniform: Float[Array, "..."],
    temperature: Float[Array, "..."],
    top_k: Int[Array, "..."] | None,
    top_p: Float[Array, "..."] | None,
    min_p: Float[Array, "..."] | None,
) -> Int32[Array, "..."]:
    if logits.shape[-1] == 0:
        raise ValueError("sample: `logits` has no token to draw from, v is 0.")
    logits = at_least_f32(logits)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    draws = temperature > 0
    weight = relative_weights(logits, temperature)
    _, weight = after_cuts(logits, weight, top_k, top_p, min_p)
    cdf = jnp.cumsum(weight, axis=-1)
    # weight > 0: a parallel cumulative sum may round upwards where nothing is added.
    # If rounding lets no token pass, the last one kept is the answer.
    passes = (cdf > column(uniform, logits) * cdf[..., -1:]) & (weight > 0)
    index = lax.broadcasted_iota(jnp.int32, weight.shape, weight.ndim - 1)
    last = jnp.max(jnp.where(weight > 0, index, 0), axis=-1)
    drawn = jnp.minimum(first_true(passes), last)
    return jnp.where(draws, drawn, argmax_reference(logits, nan_policy="ignore"))


sample_p = kernel_primitive(sample_reference, replicated=("v",))
