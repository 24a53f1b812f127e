"""The logits of the tokens that may be drawn: every cut of sampling, -inf for the rest.

top-p: https://arxiv.org/abs/1904.09751, min-p: https://arxiv.org/abs/2407.01082,
typical: https://arxiv.org/abs/2202.00666, epsilon and eta:
https://arxiv.org/abs/2210.15191.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.argmax import argmax_reference
from jaxkern.primitives.index.ordered_bits import from_ordered_bits, ordered_bits
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive

SHARES = ("top_p", "min_p", "typical_p", "epsilon", "eta")  # in [0, 1]


@check_arguments
def cut_logits(
    logits: Float[Array, "... v"],
    *,
    temperature: Float[Array, "..."] | float = 1.0,
    top_k: Int[Array, "..."] | int | None = None,
    top_p: Float[Array, "..."] | float | None = None,
    min_p: Float[Array, "..."] | float | None = None,
    typical_p: Float[Array, "..."] | float | None = None,
    epsilon: Float[Array, "..."] | float | None = None,
    eta: Float[Array, "..."] | float | None = None,
) -> Float[Array, "... v"]:
    """logits / temperature where a token may be drawn, -inf elsewhere.

    With p the softmax of logits / temperature over what the cuts before have left, and
    H = -sum(p ln p) its entropy, in this order (that of Hugging Face):

        top_k      keeps the tokens whose logit is not below the k-th largest
        top_p      keeps the smallest set of likeliest tokens whose share reaches top_p
        min_p      keeps the tokens with p >= min_p * max(p)
        typical_p  keeps the smallest set of tokens with the least |-ln p - H| whose
                   share reaches typical_p
        epsilon    keeps the tokens with p >= epsilon, and the likeliest
        eta        keeps those with p >= min(eta, sqrt(eta) exp(-H)), and the likeliest

    Tokens that tie with the last one kept are kept too. `sample` draws from these; the
    function is for what else is done with them: their log-probabilities, speculative
    sampling, a choice of one's own.

        jax.nn.log_softmax(cut_logits(logits, temperature=0.7, top_p=0.9))

    The gradient reaches `logits` and `temperature` through the tokens that are kept.
    NaN logits count as -inf. Arithmetic in float32, one rounding.

    Source: https://arxiv.org/abs/1904.09751, https://arxiv.org/abs/2407.01082,
    https://arxiv.org/abs/2202.00666, https://arxiv.org/abs/2210.15191.

    Args:
      logits: `[..., v]`, any float dtype.
      temperature: scalar or one per row. 0 or less: the likeliest token alone is kept,
        the smallest id on ties, and not divided.
      top_k: scalar or one per row, traced or not. None, 0 or less: no cut.
      top_p, typical_p: scalar or one per row, in [0, 1]. None or 1: no cut.
      min_p, epsilon, eta: scalar or one per row, in [0, 1]. None or 0: no cut.

    Returns:
      `[..., v]`, dtype of logits.

    Raises:
      TypeError: an option does not broadcast to the rows.
      ValueError: a share is a number outside [0, 1], or temperature is NaN.

    Example:
      >>> logits = jnp.array([2.0, 1.0, 0.0, -1.0])
      >>> jaxkern.cut_logits(logits, top_k=3, top_p=0.8)
      Array([  2.,   1., -inf, -inf], dtype=float32)
    """
    shares = (top_p, min_p, typical_p, epsilon, eta)
    kept = kept_tokens("cut_logits", logits, temperature, top_k, *shares)
    z = at_least_f32(logits)
    degrees = jnp.broadcast_to(jnp.asarray(temperature, z.dtype), z.shape[:-1])
    divisor = jnp.where(degrees > 0, degrees, 1)[..., None]
    # an infinite logit has no finite derivative in temperature: keep it out
    finite = kept & jnp.isfinite(z)
    y = jnp.where(finite, jnp.where(finite, z, 0) / divisor, z)
    return jnp.where(kept, y, -jnp.inf).astype(logits.dtype)


def kept_tokens(op, logits, temperature, top_k, *shares) -> Bool[Array, "... v"]:
    """Which tokens of each row the cuts of `cut_logits` leave."""
    check_cuts(op, temperature, shares)
    rows = logits.shape[:-1]

    def of_rows(name, option, dtype=jnp.float32):
        return per_row(op, name, option, rows, dtype)

    return kept_tokens_p(
        logits,
        of_rows("temperature", temperature),
        of_rows("top_k", top_k, jnp.int32),
        *map(of_rows, SHARES, shares),
    )


def check_cuts(op: str, temperature, shares) -> None:
    for name, p in zip(SHARES, shares, strict=True):
        if isinstance(p, int | float) and not 0 <= p <= 1:
            raise ValueError(f"{op}: `{name}` must lie between 0 and 1, got {p}.")
    if isinstance(temperature, float) and math.isnan(temperature):
        raise ValueError(f"{op}: `temperature` must be a number, got nan.")


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


def kept_tokens_reference(
    logits: Float[Array, "... v"],
    temperature: Float[Array, "..."],
    top_k: Int[Array, "..."] | None,
    top_p: Float[Array, "..."] | None,
    min_p: Float[Array, "..."] | None,
    typical_p: Float[Array, "..."] | None,
    epsilon: Float[Array, "..."] | None,
    eta: Float[Array, "..."] | None,
) -> Bool[Array, "... v"]:
    if logits.shape[-1] == 0:
        return jnp.zeros_like(logits, bool)
    z = at_least_f32(logits)
    z = jnp.where(jnp.isnan(z), -jnp.inf, z)
    weight = relative_weights(z, temperature)
    kept, weight = after_cuts(z, weight, top_k, top_p, min_p)
    if typical_p is not None:
        kept, weight = typical(kept, weight, typical_p)
    if epsilon is not None:
        kept, weight = above(kept, weight, column(epsilon, z))
    if eta is not None:
        most = column(eta, z)
        _, entropy = log_shares(weight)
        least = jnp.minimum(most, jnp.sqrt(most) * jnp.exp(-entropy))
        kept, weight = above(kept, weight, least)
    index = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    best = argmax_reference(z, nan_policy="ignore")[..., None]
    alone = (index == best) & (z > -jnp.inf)
    return jnp.where((temperature > 0)[..., None], kept, alone)


def column(option: Array, logits: Float[Array, "... v"]) -> Float[Array, "... 1"]:
    return option.astype(logits.dtype)[..., None]


def relative_weights(
    logits: Float[Array, "... v"], temperature: Float[Array, "..."]
) -> Float[Array, "... v"]:
    """p / max(p) of softmax(logits / temperature); logits without NaN."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    draws = (temperature > 0)[..., None]
    # a gap of inf weighs nothing at any temperature
    gap = jnp.where(logits == best, 0, best - logits)
    counts = (logits > -jnp.inf) & (gap < jnp.inf)
    distance = gap / jnp.where(draws, column(temperature, logits), 1)
    return jnp.where(counts, jnp.exp(-distance), 0)


def after_cuts(
    logits: Float[Array, "... v"],
    weight: Float[Array, "... v"],
    top_k: Int[Array, "..."] | None,
    top_p: Float[Array, "..."] | None,
    min_p: Float[Array, "..."] | None,
) -> tuple[Bool[Array, "... v"], Float[Array, "... v"]]:
    """Which tokens the first three cuts keep, and the weights with 0 for the others."""
    kept = logits > -jnp.inf
    if top_k is not None:
        asked = column(jnp.where(top_k > 0, top_k, logits.shape[-1]), logits)
        cut = largest_threshold(logits, jnp.ones_like(weight), asked)
        kept, weight = kept & (logits >= cut), jnp.where(logits >= cut, weight, 0)
    if top_p is not None:
        share = jnp.where(top_p < 1, top_p, jnp.inf)  # 1 must not cut by rounding
        target = column(share, logits) * jnp.sum(weight, axis=-1, keepdims=True)
        cut = largest_threshold(logits, weight, target)
        kept, weight = kept & (logits >= cut), jnp.where(logits >= cut, weight, 0)
    if min_p is not None:
        below = weight < jnp.minimum(column(min_p, logits), 1)
        kept, weight = kept & ~below, jnp.where(below, 0, weight)
    return kept, weight


def log_shares(
    weight: Float[Array, "... v"],
) -> tuple[Float[Array, "... v"], Float[Array, "... 1"]]:
    """ln p of each weight's share p of its row, -inf for 0, and the entropy."""
    total = jnp.sum(weight, axis=-1, keepdims=True)
    p = weight / jnp.where(total > 0, total, 1)
    some = p > 0
    log_p = jnp.where(some, jnp.log(jnp.where(some, p, 1)), -jnp.inf)
    entropy = -jnp.sum(jnp.where(some, p * jnp.log(jnp.where(some, p, 1)), 0), -1)
    return log_p, entropy[..., None]


def typical(kept, weight, typical_p):
    """The cut by the distance between -ln p and the entropy."""
    log_p, entropy = log_shares(weight)
    nearness = -abs(log_p + entropy)  # -inf for what weighs nothing
    share = jnp.where(typical_p < 1, typical_p, jnp.inf)  # 1 must not cut by rounding
    target = column(share, weight) * jnp.sum(weight, axis=-1, keepdims=True)
    near = nearness >= largest_threshold(nearness, weight, target)
    return kept & near, jnp.where(near, weight, 0)


def above(kept, weight, least):
    """The tokens whose share is at least `least`, and the likeliest."""
    total = jnp.sum(weight, axis=-1, keepdims=True)
    p = weight / jnp.where(total > 0, total, 1)
    enough = (p >= least) | (weight == jnp.max(weight, axis=-1, keepdims=True))
    return kept & enough, jnp.where(enough, weight, 0)


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


kept_tokens_p = kernel_primitive(
    kept_tokens_reference,
    replicated=("v",),  # a cut depends on all tokens of a row
)
