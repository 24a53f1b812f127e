"""One token of the gated delta rule, for decoding  (https://arxiv.org/abs/2412.06464)."""

import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.state_slots import step_in_pool
from jaxkern.primitives.kernel_primitive import kernel_primitive

HeadOrder = Literal["block", "tiled"]


@check_arguments
def gated_delta_step(
    query: Float[Array, "b k h"],
    key: Float[Array, "b k h"],
    value: Float[Array, "b k*g hv"],
    g: Float[Array, "b k*g"],
    beta: Float[Array, "b k*g"],
    state: Float[Array, "b k*g h hv"],
    *,
    scale: float | None = None,
    gqa: HeadOrder = "block",
    state_indices: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b k*g hv"], Float[Array, "b k*g h hv"]]:
    """One token: decays the state, corrects what it stores for `key`, reads `query`.

        S   <- exp(g) S
        S   <- S + beta k (v - S^T k)^T
        out =  scale S^T q

    `gated_delta_rule` over a sequence of one token; see there for the conventions.

    With `state_indices` the states lie in a pool, `state` of `[slots, n, h, hv]`, and
    row i uses slot state_indices[i]: only these are read and written, in place where
    the pool is donated to the jitted step.

    Source: https://arxiv.org/abs/2412.06464.

    Args:
      query, key: `[b, k, h]`, any float dtype, k key heads.
      value: `[b, n, hv]`, n = k*g value heads.
      g: `[b, n]`, log-decay, g <= 0.
      beta: `[b, n]`, write strength.
      state: `[b, n, h, hv]`; float32 keeps what many small steps write.
      scale: of the query, default h ** -0.5. 1.0 for queries that are scaled already.
      gqa: which key head value head i reads: "block" i // g, "tiled" i % k.
      state_indices: `[b]` int, may be traced: the slot of each row. Rows with the same
        slot leave the state of any of them; outside [0, slots), -1 say, is no row: it
        gives zeros and writes nothing.

    Returns:
      out: `[b, n, hv]`, dtype of value.
      state: the state after this token, or the pool; shape and dtype of state.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: `gqa` is neither of the two.

    Example:
      >>> key, value = jnp.array([[[1.0, 0.0]]]), jnp.array([[[3.0]]])
      >>> g, beta, old = jnp.zeros((1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1, 2, 1))
      >>> out, new = jaxkern.gated_delta_step(key, key, value, g, beta, old, scale=1.0)
      >>> out, new[0, 0]
      (Array([[[3.]]], dtype=float32), Array([[3.],
             [1.]], dtype=float32))
    """
    k = jnp.shape(key)[1] if jnp.ndim(key) > 1 else 1
    if state_indices is not None:
        b, token = (*jnp.shape(key), 1)[0], (query, key, value, g, beta)
        step = functools.partial(gated_delta_step, *token, scale=scale, gqa=gqa)
        return step_in_pool("gated_delta_step", step, b, state, state_indices)
    order = head_order("gated_delta_step", gqa, k)
    value, g, beta, state = (order(x, 1) for x in (value, g, beta, state))
    scale = default_scale(key) if scale is None else float(scale)
    out, state = gated_delta_step_p(query, key, value, g, beta, state, scale=scale)
    return order(out, 1, back=True), order(state, 1, back=True)


def default_scale(key) -> float:
    return max(jnp.shape(key)[-1], 1) ** -0.5


def head_order(op: str, gqa: str, k: int):
    """Moves the heads of an array from `gqa` order to block order, or back."""
    if gqa not in ("block", "tiled"):
        raise ValueError(f"{op}: `gqa` must be 'block' or 'tiled', got {gqa!r}.")

    def moved(x, axis: int, back: bool = False):
        n = jnp.shape(x)[axis] if jnp.ndim(x) > axis else 0
        if gqa == "block" or k < 2 or n % k:
            return x  # what does not divide is refused with the dims
        shape = jnp.shape(x)
        parts = (k, n // k) if back else (n // k, k)
        x = x.reshape(*shape[:axis], *parts, *shape[axis + 1 :])
        return jnp.swapaxes(x, axis, axis + 1).reshape(shape)

    return moved


def gated_delta_step_reference(
    query: Float[Array, "b k h"],
    key: Float[Array, "b k h"],
    value: Float[Array, "b k*g hv"],
    g: Float[Array, "b k*g"],
    beta: Float[Array, "b k*g"],
    state: Float[Array, "b k*g h hv"],
    *,
    scale: float,
) -> tuple[Float[Array, "b k*g hv"], Float[Array, "b k*g h hv"]]:
    dtype = jnp.result_type(jnp.float32, query, key, value, g, beta, state)
    k = key.shape[1]
    token = [x.astype(dtype) for x in (query, key)]
    token += [by_key_head(x.astype(dtype), k) for x in (value, g, beta)]
    new, out = delta_step(by_key_head(state.astype(dtype), k), token, scale)
    return (
        out.reshape(value.shape).astype(value.dtype),
        new.reshape(state.shape).astype(state.dtype),
    )


def by_key_head(x, k):
    """`[b k*g ...]` as `[b k g ...]`."""
    return x.reshape(x.shape[0], k, x.shape[1] // max(k, 1), *x.shape[2:])


def decayed(decay, state):
    """decay S, where a decay of 0 forgets NaN and inf as well."""
    return decay * jnp.where(decay == 0, 0, state)


def delta_step(state, token, scale):
    """(new state, out) of one token; state `[b k g h v]`, query `[b k h]`."""
    state, _, out = corrected_step(state, token, scale)
    return state, out


def corrected_step(state, token, scale):
    """`delta_step` with what the token writes under its key between them."""
    query, key, value, g, beta = token
    state = decayed(jnp.exp(g)[..., None, None], state)
    error = value - jnp.einsum("bkghv,bkh->bkgv", state, key)
    correction = beta[..., None] * error
    state = state + jnp.einsum("bkh,bkgv->bkghv", key, correction)
    return state, correction, scale * jnp.einsum("bkghv,bkh->bkgv", state, query)


gated_delta_step_p = kernel_primitive(
    gated_delta_step_reference,
    replicated=("h",),  # S^T k runs over h; the columns of S are independent
)
