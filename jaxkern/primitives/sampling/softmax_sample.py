"""Sampling by a given uniform number: the first token whose cumulative p exceeds it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.sampling.cut_logits import per_row
from jaxkern.primitives.sampling.sample import sample_reference


@check_arguments
def softmax_sample(
    logits: Float[Array, "... v"],
    uniform: Float[Array, "..."] | float,
    *,
    temperature: Float[Array, "..."] | float = 1.0,
) -> tuple[Int32[Array, "..."], Float[Array, "..."]]:
    """One token per row by inverting the cumulative softmax, and its log-probability.

        p = softmax(logits / temperature)
        token = the first i with p[0] + ... + p[i] > u,    logprob = log(p[token])

    The draw of `sample` without its cuts and with the random number given: the same u
    gives the same token on every run. A token of probability zero is never drawn, also
    not by u = 0 (a comparison >= u would draw token 0 then, whatever its probability).
    `logprob` is differentiable in logits and temperature, `token` is not: the score
    function of a policy gradient.

    NaN logits count as -inf, as in `sample`; a row without a token above -inf gives
    token 0 with logprob -inf. Arithmetic in float32.

    Args:
      logits: `[..., v]`, any float dtype.
      uniform: u in [0, 1), `[...]` or a scalar for all rows.
      temperature: scalar or one per row, may be traced. 0 or less: the likeliest token,
        the smallest id on ties, with logprob 0.

    Returns:
      token: int32, `[...]`.
      logprob: float32, `[...]`; natural logarithm.

    Raises:
      TypeError: `uniform` or `temperature` does not broadcast to the rows.
      ValueError: v is 0.

    Example:
      >>> logits = jnp.array([0.0, 0.0, 0.0, 0.0])
      >>> token, logprob = jaxkern.softmax_sample(logits, 0.6)
      >>> token, logprob
      (Array(2, dtype=int32), Array(-1.386, dtype=float32))
    """
    rows = logits.shape[:-1]
    return softmax_sample_p(
        logits,
        per_row("softmax_sample", "uniform", uniform, rows, jnp.float32),
        per_row("softmax_sample", "temperature", temperature, rows, jnp.float32),
    )


def softmax_sample_reference(
    logits: Float[Array, "... v"],
    uniform: Float[Array, "..."],
    temperature: Float[Array, "..."],
) -> tuple[Int32[Array, "..."], Float[Array, "..."]]:
    if logits.shape[-1] == 0:
        raise ValueError("softmax_sample: `logits` has no token to draw, v is 0.")
    operands = lax.stop_gradient((logits, uniform, temperature))
    token = sample_reference(*operands, None, None, None)
    z, scale = at_least_f32(logits), at_least_f32(temperature)[..., None]
    draws = scale > 0
    scale = jnp.where(draws, scale, 1)
    z = jnp.where(jnp.isnan(z), -jnp.inf, z)
    best = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    # exp of less than -1000 is 0, also in float64; in a row with inf only inf counts
    gap = jnp.where(z == best, 0, best - z)
    counts = (z > -jnp.inf) & (gap < 1000 * scale)
    below = jnp.where(counts & jnp.isfinite(best), z - best, 0) / scale
    total = jnp.sum(jnp.where(counts, jnp.exp(below), 0), axis=-1)
    index = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    drawn = jnp.sum(jnp.where(index == token[..., None], below, 0), axis=-1)
    logprob = drawn - jnp.log(jnp.where(total > 0, total, 1))
    logprob = jnp.where(draws[..., 0], logprob, 0)
    return token, jnp.where(total > 0, logprob, -jnp.inf)


softmax_sample_p = kernel_primitive(softmax_sample_reference, replicated=("v",))
