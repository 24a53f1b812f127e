"""One token of a whole gated delta net between its two products  (https://arxiv.org/abs/2412.06464)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.compute_g_beta import compute_g_beta_reference
from jaxkern.primitives.delta_rule.gated_delta_step import (
    gated_delta_step_reference,
)
from jaxkern.primitives.kernel_primitive import kernel_primitive

KEY_EPS = 1e-6  # of the norm of queries and keys, as in `l2_norm`


@check_arguments
def gated_delta_net_step(
    qkv: Float[Array, "b c"],
    gate: Float[Array, "b n hv"],
    write: Float[Array, "b n"],
    rate: Float[Array, "b n"],
    weight: Float[Array, "c w"],
    a_log: Float[Array, " n"],
    dt_bias: Float[Array, " n"],
    norm: Float[Array, " hv"],
    inputs: Float[Array, "b past c"],
    state: Float[Array, "b n h hv"],
    counts: Int[Array, " b"] | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[Float[Array, "b n hv"], Float[Array, "b past c"], Float[Array, "b n h hv"]]:
    """One token of a gated delta net: all that stands between its two products.

        q, k, v = silu(causal_conv1d_step(qkv))        k key heads, then n value heads
        g, beta = compute_g_beta(rate, write, a_log, dt_bias)
        y       = gated_delta_step(q / |q|, k / |k|, v, g, beta)
        out     = gated_rms_norm(y, gate, norm)

    with |q| = sqrt(sum(q**2) + 1e-6). Value head i reads key head i // (n / k). All in
    float32 (float64 for float64 operands), rounded once: the operators one by one round
    q, k, v and y to the dtype of what they are given.

    Source: https://arxiv.org/abs/2412.06464.

    Args:
      qkv: `[b, c]`, any float dtype: of q, k and v side by side, c = 2*k*h + n*hv.
      gate: `[b, n, hv]`, often called z.
      write: `[b, n]`, of the write strength, often called b.
      rate: `[b, n]`, of the decay, often called a.
      weight: `[c, w]`, taps of the convolution, the last that of this token.
      a_log, dt_bias: `[n]`, see `compute_g_beta`.
      norm: `[hv]`, weight of the norm.
      inputs: `[b, w - 1, c]`, of the tokens before, the oldest first.
      state: `[b, n, h, hv]`; float32 keeps what many small steps write.
      counts: `[b]`, 0 where the row has no token: its inputs and state stay as they are
        bit by bit, and its result means nothing. None: all rows have one.
      eps: of the norm, in units of y**2.

    Returns:
      out: `[b, n, hv]`, dtype of gate.
      inputs: with this token's last; dtype as before.
      state: after this token; dtype as before.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: c is not 2*k*h + n*hv with k heads that divide n, or eps is negative.

    Example:
      >>> ones, old = jnp.ones((1, 1)), jnp.zeros((1, 1, 1, 2))
      >>> qkv, gate, taps = jnp.ones((1, 4)), jnp.ones((1, 1, 2)), jnp.ones((4, 1))
      >>> weights = (taps, jnp.zeros(1), jnp.zeros(1), jnp.ones(2))
      >>> token, inputs = (qkv, gate, ones, ones), jnp.zeros((1, 0, 4))
      >>> out, _, new = jaxkern.gated_delta_net_step(*token, *weights, inputs, old)
      >>> out, new[0, 0]
      (Array([[[0.731, 0.731]]], dtype=float32), Array([[0.534, 0.534]], dtype=float32))
    """
    return gated_delta_net_step_p(
        *(qkv, gate, write, rate, weight, a_log, dt_bias, norm, inputs, state, counts),
        eps=eps,
    )


def key_heads(op: str, c: int, n: int, h: int, hv: int) -> int:
    """How many there are in c channels.

    Raises:
      ValueError: not a whole number, or not one that divides n.
    """
    k = (c - n * hv) // (2 * h) if h else 0
    if k < 1 or 2 * k * h + n * hv != c or n % k:
        raise ValueError(
            f"{op}: `qkv` has {c} channels, which must be 2*k*h + n*hv for k key heads "
            f"that divide n; `state` has n = {n}, h = {h}, hv = {hv}."
        )
    return k


def gated_delta_net_step_reference(
    qkv: Float[Array, "b c"],
    gate: Float[Array, "b n hv"],
    write: Float[Array, "b n"],
    rate: Float[Array, "b n"],
    weight: Float[Array, "c w"],
    a_log: Float[Array, " n"],
    dt_bias: Float[Array, " n"],
    norm: Float[Array, " hv"],
    inputs: Float[Array, "b past c"],
    state: Float[Array, "b n h hv"],
    counts: Int[Array, " b"] | None,
    *,
    eps: float,
) -> tuple[Float[Array, "b n hv"], Float[Array, "b past c"], Float[Array, "b n h hv"]]:
    b, n, h, hv = state.shape
    op = "gated_delta_net_step"
    if weight.shape[1] != inputs.shape[1] + 1:
        raise TypeError(
            f"{op}: `weight` has {weight.shape[1]} taps and `inputs` {inputs.shape[1]} "
            "tokens. It takes w >= 1 taps and w - 1 tokens."
        )
    k = key_heads(op, qkv.shape[1], n, h, hv)
    dtype = jnp.result_type(jnp.float32, qkv, gate, weight, state)
    wide = jnp.result_type(qkv, inputs)
    seen = jnp.concatenate([inputs.astype(wide), qkv[:, None].astype(wide)], axis=1)
    mixed = jnp.einsum("bwc,cw->bc", seen.astype(dtype), weight.astype(dtype))
    mixed = jax.nn.silu(mixed)
    query, key, value = jnp.split(mixed, (k * h, 2 * k * h), axis=1)
    query, key = (unit(x.reshape(b, k, h)) for x in (query, key))
    g, beta = compute_g_beta_reference(rate, write, a_log, dt_bias)
    token = (query, key, value.reshape(b, n, hv), g, beta)
    y, new = gated_delta_step_reference(*token, state, scale=h**-0.5)
    rstd = lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    out = y * rstd * norm.astype(dtype) * jax.nn.silu(gate.astype(dtype))
    after = seen[:, 1:].astype(inputs.dtype)
    if counts is not None:
        after, new = (kept(counts, *pair) for pair in ((after, inputs), (new, state)))
    return out.astype(gate.dtype), after, new


def unit(x: Float[Array, "b k h"]) -> Float[Array, "b k h"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + KEY_EPS)


def kept(counts: Int[Array, " b"], new: Any, old: Any) -> Any:
    """`new` where a row counts."""
    rows = (counts > 0).reshape(-1, *(1,) * (new.ndim - 1))
    return jnp.where(rows, new, old)


gated_delta_net_step_p = kernel_primitive(
    gated_delta_net_step_reference,
    # a program has the norm of a whole head, and q, k and v lie in one row of channels
    replicated=("c", "n", "h", "hv", "past", "w"),
)
