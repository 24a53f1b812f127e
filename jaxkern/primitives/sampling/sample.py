"""Sampling a token from softmax(logits / temperature), cut by top-k, top-p and min-p.

top-p: https://arxiv.org/abs/1904.09751, min-p: https://arxiv.org/abs/2407.01082.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxkern.primitives.index.argmax import argmax, argmax_reference, first_true
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


def sample(
    logits: Float[Array, "... v"],
    key: jax.Array,
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
      TypeError: an option does not broadcast to the rows.
      ValueError: v is 0, or top_p or min_p is a number outside [0, 1].
    """
    rows = logits.shape[:-1]
    for name, p in (("top_p", top_p), ("min_p", min_p)):
        if isinstance(p, int | float) and not 0 <= p <= 1:
            raise ValueError(f"sample: `{name}` must lie between 0 and 1, got {p}.")
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
    possible = logits > -jnp.inf
    best = jnp.max(logits, axis=-1, keepdims=True)
    draws = (temperature > 0)[..., None]
    # distance >= 0 of each token below the best; weight = p / max(p)
    gap = jnp.where(logits == best, 0, best - logits)
    distance = gap / jnp.where(draws, column(temperature, logits), 1)
    distance = jnp.where(possible, distance, jnp.inf)
    weight = jnp.where(possible, jnp.exp(-distance), 0)
    if top_k is not None:
        asked = jnp.where(top_k > 0, top_k, logits.shape[-1])
        cut = smallest_radius(distance, jnp.ones_like(weight), column(asked, logits))
        weight = jnp.where(distance <= cut, weight, 0)
    if top_p is not None:
        share = jnp.where(top_p < 1, top_p, jnp.inf)  # 1 must not cut by rounding
        target = column(share, logits) * jnp.sum(weight, axis=-1, keepdims=True)
        weight = jnp.where(
            distance <= smallest_radius(distance, weight, target), weight, 0
        )
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


def smallest_radius(
    distance: Float[Array, "... v"],
    weight: Float[Array, "... v"],
    target: Float[Array, "... 1"],
) -> Float[Array, "... 1"]:
    """The smallest radius whose tokens, distance <= radius, weigh `target` together.

    Infinity if none does. Floats >= 0 are ordered as their bits, so bisecting the bits
    ends at one of the distances, exactly.
    """
    width = 8 * distance.dtype.itemsize
    integer = jnp.dtype(f"int{width}")
    below = jnp.full_like(target, -1, integer)  # the bits of no float: too light
    reaches = lax.bitcast_convert_type(jnp.full_like(target, jnp.inf), integer)

    def halve(_, bounds):
        below, reaches = bounds
        middle = reaches - (reaches - below) // 2  # rounds up: never the -1
        radius = lax.bitcast_convert_type(middle, distance.dtype)
        inside = jnp.where(distance <= radius, weight, 0)
        enough = jnp.sum(inside, axis=-1, keepdims=True) >= target
        return jnp.where(enough, below, middle), jnp.where(enough, middle, reaches)

    _, reaches = lax.fori_loop(0, width, halve, (below, reaches))
    return lax.bitcast_convert_type(reaches, distance.dtype)


sample_p = kernel_primitive(sample_reference, replicated=("v",))
