"""Sampling a token from softmax(logits / temperature), cut by top-k, top-p and min-p.

top-p: https://arxiv.org/abs/1904.09751, min-p: https://arxiv.org/abs/2407.01082.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32, PRNGKeyArray

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.argmax import argmax, argmax_reference, first_true
from jaxkern.primitives.index.ordered_bits import from_ordered_bits, ordered_bits
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def sample(
    logits: Float[Array, "... v"],
    key: PRNGKeyArray,
    *,
    temperature: Float[Array, "..."] | float = 1.0,
    top_k: Int[Array, "..."] | int | None = None,
    top_p: Float[Array, "..."] | float | None = None,
    min_p: Float[Array, "..."] | float | None = None,
) -> Int32[Array, "..."]:
    """One token id per row, drawn from softmax(logits / temperature) after three cuts.

    With p = softmax(logits / temperature), in this order (that of Hugging Face;
    llama.cpp makes the same cuts but applies the temperature last):

        top_k   keeps the tokens whose logit is not below the k-th largest
        top_p   keeps the smallest set of likeliest tokens whose share of what is left
                reaches top_p: the token that crosses it is kept, and one at least
        min_p   keeps the tokens with p >= min_p * max(p)

    Tokens that tie with the last one kept are kept too, by each cut: no cut depends on
    the order of the vocabulary. Then u is drawn uniformly from [0, 1) and the result is
    the first token, in the order of the vocabulary, whose cumulative probability
    exceeds u. A token of probability zero is never drawn.

    The cuts need no sort: a bisection on the bits of float32 finds each threshold
    exactly in 32 passes over the row. Each row has its own u and does not depend on the
    others. Arithmetic in float32.

    NaN logits count as -inf. A row without a token above -inf gives 0, one with +inf
    draws among its +inf. The result has no gradient.

    Args:
      logits: `[..., v]`, any float dtype.
      key: a PRNG key, used once.
      temperature: scalar or one per row. 0 or less: the likeliest token, the smallest
        id on ties. inf: uniform among the tokens that are kept.
      top_k: scalar or one per row, traced or not. None, 0 or less: no cut.
      top_p: scalar or one per row, in [0, 1]. None or 1: no cut.
      min_p: scalar or one per row, in [0, 1]. None or 0: no cut.

    Returns:
      ids: int32, `[...]`.

    Raises:
      TypeError: `key` is no key, or an option does not broadcast to the rows.
      ValueError: v is 0, top_p or min_p is a number outside [0, 1], or temperature
        is NaN.
    """
    rows = logits.shape[:-1]
    for name, p in (("top_p", top_p), ("min_p", min_p)):
        if isinstance(p, int | float) and not 0 <= p <= 1:
            raise ValueError(f"sample: `{name}` must lie between 0 and 1, got {p}.")
    if isinstance(temperature, float) and math.isnan(temperature):
        raise ValueError("sample: `temperature` must be a number, got nan.")
    if isinstance(temperature, int | float) and temperature <= 0:
        return argmax(logits, nan_policy="ignore")
    uniform = jax.random.uniform(key, rows, jnp.float32)
    return sample_p(
        logits,
        uniform,
        per_row("sample", "temperature", temperature, rows, jnp.float32),
        per_row("sample", "top_k", top_k, rows, jnp.int32),
        per_row("sample", "top_p", top_p, rows, jnp.float32),
        per_row("sample", "min_p", min_p, rows, jnp.float32),
    )


def per_row(
    op: str,
    name: str,
    option: jax.typing.ArrayLike | None,
    rows: tuple[int, ...],
    dtype,
) -> Array | None:
    """`option` as an array with one entry per row."""
    if option is None:
        return None
    option = jnp.asarray(option, dtype)
    try:
        return jnp.broadcast_to(option, rows)
    except ValueError:
        raise TypeError(
            f"{op}: `{name}` of shape {option.shape} must be a scalar or have one "
            f"entry per row, {rows}."
        ) from None


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
    best = jnp.max(logits, axis=-1, keepdims=True)
    draws = (temperature > 0)[..., None]
    # weight = p / max(p); a gap of inf weighs nothing at any temperature
    gap = jnp.where(logits == best, 0, best - logits)
    counts = (logits > -jnp.inf) & (gap < jnp.inf)
    distance = gap / jnp.where(draws, column(temperature, logits), 1)
    weight = jnp.where(counts, jnp.exp(-distance), 0)
    if top_k is not None:
        asked = column(jnp.where(top_k > 0, top_k, logits.shape[-1]), logits)
        cut = largest_threshold(logits, jnp.ones_like(weight), asked)
        weight = jnp.where(logits >= cut, weight, 0)
    if top_p is not None:
        share = jnp.where(top_p < 1, top_p, jnp.inf)  # 1 must not cut by rounding
        target = column(share, logits) * jnp.sum(weight, axis=-1, keepdims=True)
        cut = largest_threshold(logits, weight, target)
        weight = jnp.where(logits >= cut, weight, 0)
    if min_p is not None:
        weight = jnp.where(weight < jnp.minimum(column(min_p, logits), 1), 0, weight)
    cdf = jnp.cumsum(weight, axis=-1)
    # weight > 0: a parallel cumulative sum may round upwards where nothing is added.
    # If rounding lets no token pass, the last one kept is the answer.
    passes = (cdf > column(uniform, logits) * cdf[..., -1:]) & (weight > 0)
    index = lax.broadcasted_iota(jnp.int32, weight.shape, weight.ndim - 1)
    last = jnp.max(jnp.where(weight > 0, index, 0), axis=-1)
    drawn = jnp.minimum(first_true(passes), last)
    return jnp.where(
        draws[..., 0], drawn, argmax_reference(logits, nan_policy="ignore")
    )


def column(option: Array, logits: Float[Array, "... v"]) -> Float[Array, "... 1"]:
    return option.astype(logits.dtype)[..., None]


def largest_threshold(
    logits: Float[Array, "... v"],
    weight: Float[Array, "... v"],
    target: Float[Array, "... 1"],
) -> Float[Array, "... 1"]:
    """The largest t for which the tokens with logits >= t weigh `target` together.

    At most the largest logit, and -inf if no t is low enough. Bisecting numbers that
    order floats as integers ends at one of the logits, exactly.
    """
    reaches = ordered_bits(jnp.full_like(target, -jnp.inf))
    beyond = ordered_bits(jnp.max(logits, axis=-1, keepdims=True)) + 1

    def halve(_, bounds):
        reaches, beyond = bounds
        middle = (reaches & beyond) + ((reaches ^ beyond) >> 1)  # no overflow
        above = jnp.where(logits >= from_ordered_bits(middle, logits.dtype), weight, 0)
        enough = jnp.sum(above, axis=-1, keepdims=True) >= target
        return jnp.where(enough, middle, reaches), jnp.where(enough, beyond, middle)

    width = 8 * logits.dtype.itemsize
    reaches, _ = lax.fori_loop(0, width, halve, (reaches, beyond))
    return from_ordered_bits(reaches, logits.dtype)


sample_p = kernel_primitive(sample_reference, replicated=("v",))
