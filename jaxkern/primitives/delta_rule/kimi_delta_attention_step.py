"""One token of Kimi delta attention, for decoding  (https://arxiv.org/abs/2510.26692)."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.gated_delta_step import by_key_head, default_scale
from jaxkern.primitives.delta_rule.kimi_delta_chunks import delta_step
from jaxkern.primitives.delta_rule.state_slots import step_in_pool
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def kimi_delta_attention_step(
    query: Float[Array, "b k h"],
    key: Float[Array, "b k h"],
    value: Float[Array, "b k*g hv"],
    g: Float[Array, "b k*g h"],
    beta: Float[Array, "b k*g"],
    state: Float[Array, "b k*g h hv"],
    *,
    scale: float | None = None,
    state_indices: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b k*g hv"], Float[Array, "b k*g h hv"]]:
    """One token: decays each row of the state, corrects what it stores, reads it.

        S   <- Diag(exp(g)) S
        S   <- S + beta k (v - S^T k)^T
        out =  scale S^T q

    `kimi_delta_attention` over a sequence of one token; see there for the conventions.

    With `state_indices` the states lie in a pool, `state` of `[slots, n, h, hv]`, and
    row i uses slot state_indices[i]: only these are read and written, in place where
    the pool is donated to the jitted step.

    Source: https://arxiv.org/abs/2510.26692.

    Args:
      query, key: `[b, k, h]`, any float dtype, k key heads.
      value: `[b, n, hv]`, n = k*g value heads.
      g: `[b, n, h]`, log-decay of each channel of the keys, at most 0.
      beta: `[b, n]`, write strength.
      state: `[b, n, h, hv]`; float32 keeps what many small steps write.
      scale: of the query, default h ** -0.5. 1.0 for queries that are scaled already.
      state_indices: `[b]` int, may be traced: the slot of each row. Rows with the same
        slot leave the state of any of them; outside [0, slots), -1 say, is no row: it
        gives zeros and writes nothing.

    Returns:
      out: `[b, n, hv]`, dtype of value.
      state: the state after this token, or the pool; shape and dtype of state.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.

    Example:
      >>> key, value = jnp.array([[[1.0, 0.0]]]), jnp.array([[[3.0]]])
      >>> g, beta = jnp.array([[[0.0, -1.0]]]), jnp.ones((1, 1))
      >>> token = (key, key, value, g, beta)
      >>> out, new = jaxkern.kimi_delta_attention_step(*token, jnp.ones((1, 1, 2, 1)))
      >>> new[0, 0]  # the key's row holds its value, the other one has decayed
      Array([[3.   ],
             [0.368]], dtype=float32)
    """
    token = (query, key, value, g, beta)
    if state_indices is not None:
        op, b = "kimi_delta_attention_step", (*jnp.shape(key), 1)[0]
        step = functools.partial(kimi_delta_attention_step, *token, scale=scale)
        return step_in_pool(op, step, b, state, state_indices)
    scale = default_scale(key) if scale is None else float(scale)
    return kimi_delta_attention_step_p(*token, state, scale=scale)


def kimi_delta_attention_step_reference(
    query: Float[Array, "b k h"],
    key: Float[Array, "b k h"],
    value: Float[Array, "b k*g hv"],
    g: Float[Array, "b k*g h"],
    beta: Float[Array, "b k*g"],
    state: Float[Array, "b k*g h hv"],
    *,
    scale: float,
) -> tuple[Float[Array, "b k*g hv"], Float[Array, "b k*g h hv"]]:
    dtype = jnp.result_type(jnp.float32, query, key, value, g, beta, state)
    query, key = query.astype(dtype), key.astype(dtype)
    of_heads = (by_key_head(x.astype(dtype), key.shape[1]) for x in (value, g, beta))
    old = by_key_head(state.astype(dtype), key.shape[1])
    new, out = delta_step(old, (query, key, *of_heads), scale)
    return (
        out.reshape(value.shape).astype(value.dtype),
        new.reshape(state.shape).astype(state.dtype),
    )


kimi_delta_attention_step_p = kernel_primitive(
    kimi_delta_attention_step_reference,
    replicated=("h",),  # S^T k runs over h; the columns of S are independent
)
