"""The two gates of a gated delta rule: log-decay g <= 0 and write strength beta.

g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)  (https://arxiv.org/abs/2412.06464).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def compute_g_beta(
    a: Float[Array, "... n"],
    b: Float[Array, "... n"],
    a_log: Float[Array, " n"],
    dt_bias: Float[Array, " n"],
) -> tuple[Float[Array, "... n"], Float[Array, "... n"]]:
    """Log-decay and write strength of each token and head, from two projections.

        g    = -exp(a_log) * softplus(a + dt_bias)      the state decays by exp(g) <= 1
        beta = sigmoid(b)

    In all of jaxkern g is a log-decay, g <= 0, as in Hugging Face and
    flash-linear-attention. llama.cpp's GGUF files store `ssm_a` = -exp(a_log): pass
    `a_log=jnp.log(-ssm_a)`. Values from a system that decays by exp(-g) with g >= 0
    become ours by `log_decay_from_positive`.

    Source: https://arxiv.org/abs/2412.06464.

    Args:
      a: `[..., n]`, any float dtype, one value per head.
      b: `[..., n]`, any float dtype.
      a_log: `[n]`, logarithm of the decay rate.
      dt_bias: `[n]`.

    Returns:
      g: `[..., n]`, float32 (float64 if an operand is), never above 0.
      beta: `[..., n]`, float32 (float64 for a float64 `b`), in [0, 1].

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.

    Example:
      >>> zeros = jnp.zeros(2)
      >>> g, beta = jaxkern.compute_g_beta(jnp.array([0.0, 9.0]), zeros, zeros, zeros)
      >>> g, beta
      (Array([-0.693, -9.   ], dtype=float32), Array([0.5, 0.5], dtype=float32))
    """
    return compute_g_beta_p(a, b, a_log, dt_bias)


@check_arguments
def log_decay_from_positive(g: Float[Array, "..."]) -> Float[Array, "..."]:
    """The log-decay of a rate that is positive: a state decays by exp(-g).

        log_decay = -g

    Args:
      g: `[...]`, any float dtype, not negative.

    Returns:
      -g, the `g` of `gated_delta_rule`.

    Raises:
      TypeError: g is no float array.

    Example:
      >>> jaxkern.log_decay_from_positive(jnp.array([0.5, 2.0]))
      Array([-0.5, -2. ], dtype=float32)
    """
    return -g


def compute_g_beta_reference(
    a: Float[Array, "... n"],
    b: Float[Array, "... n"],
    a_log: Float[Array, " n"],
    dt_bias: Float[Array, " n"],
) -> tuple[Float[Array, "... n"], Float[Array, "... n"]]:
    step = jax.nn.softplus(at_least_f32(a) + at_least_f32(dt_bias))
    return -jnp.exp(at_least_f32(a_log)) * step, jax.nn.sigmoid(at_least_f32(b))


compute_g_beta_p = kernel_primitive(compute_g_beta_reference)
