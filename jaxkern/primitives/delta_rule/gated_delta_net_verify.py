"""Drafted tokens of a gated delta net, behind those of the last call that are accepted.

Speculative decoding reads some tokens at once and learns afterwards how many of them
were right. A state of each would be h*hv numbers a head. What a token adds to the state
is an outer product, h + hv numbers, and a decay: these are kept, and the next call adds
those that stay. The rule is of https://arxiv.org/abs/2412.06464.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.compute_g_beta import compute_g_beta_reference
from jaxkern.primitives.delta_rule.gated_delta_net_step import key_heads, unit
from jaxkern.primitives.delta_rule.gated_delta_step import by_key_head, corrected_step
from jaxkern.primitives.kernel_primitive import kernel_primitive

OP = "gated_delta_net_verify"


class Verified(NamedTuple):
    """Results of `gated_delta_net_verify`, the last five for the call after it."""

    out: Float[Array, "b t n hv"]
    inputs: Float[Array, "b rows c"]
    state: Float[Array, "b n h hv"]
    keys: Float[Array, "b t n h"]
    corrections: Float[Array, "b t n hv"]
    g: Float[Array, "b t n"]


@check_arguments
def gated_delta_net_verify(
    qkv: Float[Array, "b t c"],
    gate: Float[Array, "b t n hv"],
    write: Float[Array, "b t n"],
    rate: Float[Array, "b t n"],
    weight: Float[Array, "c w"],
    a_log: Float[Array, " n"],
    dt_bias: Float[Array, " n"],
    norm: Float[Array, " hv"],
    inputs: Float[Array, "b rows c"],
    state: Float[Array, "b n h hv"],
    keys: Float[Array, "b t n h"],
    corrections: Float[Array, "b t n hv"],
    g: Float[Array, "b t n"],
    accepted: Int[Array, " b"],
    *,
    eps: float = 1e-6,
) -> Verified:
    """t drafted tokens of a gated delta net, behind the accepted ones of the last call.

    `gated_delta_net_step` token by token, but none of these t tokens enters the state:
    how many of them stay is known only afterwards. Each leaves what it would add, and
    the next call begins with the first `accepted[b]` of them:

        S    <- exp(g_i) S + keys_i corrections_i^T                 for i < accepted
        then for each of the t new tokens, with S' = S at first:
        S'   <- exp(g) S' + k d^T,    d = beta (v - exp(g) S'^T k)
        out   = gated_rms_norm(S'^T q, gate, norm)

    with q, k, v, g and beta of `gated_delta_net_step`. The state is read once and
    written once, whatever t is. All in float32 (float64 for float64 operands).

    The first call has zeros for keys, corrections and g, `inputs` whose first w - 1
    rows are the last tokens, and `accepted` 0. A row that rests gives 0 again and
    again: its state stays as it is, its results mean nothing.

    Source: https://arxiv.org/abs/2412.06464.

    Args:
      qkv: `[b, t, c]`, any float dtype: of q, k and v side by side, c = 2*k*h + n*hv.
      gate: `[b, t, n, hv]`; write, rate: `[b, t, n]`; weight: `[c, w]`; a_log, dt_bias:
        `[n]`; norm: `[hv]`: see `gated_delta_net_step`.
      inputs: `[b, w - 1 + t, c]`: the w - 1 tokens before the last call's, and those.
      state: `[b, n, h, hv]`, before the last call's tokens; float32 keeps what many
        small steps write.
      keys: `[b, t, n, h]`, k / |k| of the last call's tokens, for each value head.
      corrections: `[b, t, n, hv]`, their d.
      g: `[b, t, n]`, their log-decays.
      accepted: `[b]`, how many of the last call's tokens stay; what is outside of
        [0, t] counts as the nearer end.
      eps: of the norm, in units of y**2.

    Returns:
      out: `[b, t, n, hv]`, dtype of gate.
      inputs, state, keys, corrections, g: for the next call; dtypes as before.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: c is not 2*k*h + n*hv with k heads that divide n, `inputs` has not
        w - 1 + t rows, or eps is negative.

    Example:
      >>> weights = jnp.ones((4, 1)), jnp.zeros(1), jnp.zeros(1), jnp.ones(2)
      >>> gates, values = jnp.ones((1, 2, 1)), jnp.ones((1, 2, 1, 2))
      >>> call = jnp.ones((1, 2, 4)), values, gates, gates, *weights
      >>> left = jnp.zeros((1, 2, 4)), jnp.zeros((1, 1, 1, 2))  # inputs and state
      >>> left += 0 * gates[..., None], 0 * values, 0 * gates
      >>> _, *left = jaxkern.gated_delta_net_verify(*call, *left, jnp.array([0]))
      >>> found = jaxkern.gated_delta_net_verify(*call, *left, jnp.array([1]))
      >>> left[1][0, 0], found.state[0, 0]
      (Array([[0., 0.]], dtype=float32), Array([[0.534, 0.534]], dtype=float32))
    """
    return Verified(
        *gated_delta_net_verify_p(
            *(qkv, gate, write, rate, weight, a_log, dt_bias, norm, inputs, state),
            *(keys, corrections, g, accepted),
            eps=eps,
        )
    )


def gated_delta_net_verify_reference(
    qkv: Float[Array, "b t c"],
    gate: Float[Array, "b t n hv"],
    write: Float[Array, "b t n"],
    rate: Float[Array, "b t n"],
    weight: Float[Array, "c w"],
    a_log: Float[Array, " n"],
    dt_bias: Float[Array, " n"],
    norm: Float[Array, " hv"],
    inputs: Float[Array, "b rows c"],
    state: Float[Array, "b n h hv"],
    keys: Float[Array, "b t n h"],
    corrections: Float[Array, "b t n hv"],
    g: Float[Array, "b t n"],
    accepted: Int[Array, " b"],
    *,
    eps: float,
) -> Verified:
    (b, n, h, hv), (t, c) = state.shape, qkv.shape[1:]
    k, w = key_heads(OP, c, n, h, hv), weight.shape[1]
    check_rows(inputs, w, t)
    dtype = jnp.result_type(jnp.float32, qkv, gate, weight, state)
    accepted = jnp.clip(accepted, 0, t)
    start = with_accepted(state.astype(dtype), keys, corrections, g, accepted)
    window = rows_from(inputs, accepted, w - 1)
    wide = jnp.result_type(qkv, inputs)
    seen = jnp.concatenate([window.astype(wide), qkv.astype(wide)], axis=1)
    taps = jnp.stack([seen[:, i : i + t] for i in range(w)], axis=-1).astype(dtype)
    mixed = jax.nn.silu(jnp.einsum("btcw,cw->btc", taps, weight.astype(dtype)))
    query, key, value = jnp.split(mixed, (k * h, 2 * k * h), axis=2)
    query, key = (unit(x.reshape(b, t, k, h)) for x in (query, key))
    new_g, beta = compute_g_beta_reference(rate, write, a_log, dt_bias)
    tokens = (query, key, value.reshape(b, t, n, hv), new_g, beta)

    def step(state, token):
        query, key, *of_heads = token
        of_heads = [by_key_head(x, k) for x in of_heads]
        state, *found = corrected_step(state, (query, key, *of_heads), h**-0.5)
        return state, [x.reshape(b, n, hv) for x in found]

    by_token = [jnp.moveaxis(x.astype(dtype), 1, 0) for x in tokens]
    _, found = lax.scan(step, by_key_head(start, k), by_token)
    new_corrections, y = (jnp.moveaxis(x, 0, 1) for x in found)
    rstd = lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    out = y * rstd * norm.astype(dtype) * jax.nn.silu(gate.astype(dtype))
    return Verified(
        out.astype(gate.dtype),
        seen.astype(inputs.dtype),
        start.astype(state.dtype),
        jnp.repeat(key, n // k, axis=2).astype(keys.dtype),
        new_corrections.astype(corrections.dtype),
        new_g.astype(g.dtype),
    )


def check_rows(inputs: Float[Array, "b rows c"], w: int, t: int) -> None:
    if w < 1 or inputs.shape[1] != w - 1 + t:
        raise ValueError(
            f"{OP}: `inputs` has {inputs.shape[1]} rows for {w} taps and {t} tokens. "
            "It takes w >= 1 taps and w - 1 + t rows: the tokens before the last "
            "call's, and those."
        )


def with_accepted(
    state: Float[Array, "b n h hv"],
    keys: Float[Array, "b t n h"],
    corrections: Float[Array, "b t n hv"],
    g: Float[Array, "b t n"],
    accepted: Int[Array, " b"],
) -> Float[Array, "b n h hv"]:
    """The state behind the accepted tokens: their sum, for none needs the others."""
    counts = jnp.arange(g.shape[1]) < accepted[:, None]
    keys, corrections = (
        jnp.where(counts[..., None, None], x, 0).astype(state.dtype)
        for x in (keys, corrections)
    )
    g = jnp.where(counts[..., None], g, 0).astype(state.dtype)
    # a token's decay is of those behind it: sums, no differences, for g may be -inf
    behind = jnp.flip(jnp.cumsum(jnp.flip(g, 1), axis=1), 1)
    behind = jnp.concatenate([behind, jnp.zeros_like(g[:, :1])], axis=1)
    keys = keys * jnp.exp(behind[:, 1:])[..., None]
    added = jnp.einsum("btnh,btnv->bnhv", keys, corrections)
    return jnp.exp(behind[:, 0])[..., None, None] * state + added


def rows_from(
    x: Float[Array, "b rows c"], starts: Int[Array, " b"], size: int
) -> Float[Array, "b size c"]:
    """`size` rows of each sequence from its start on."""
    at = starts[:, None] + jnp.arange(size)
    return jnp.take_along_axis(x, at[..., None], axis=1, mode="clip")


gated_delta_net_verify_p = kernel_primitive(
    gated_delta_net_verify_reference,
    # a program has the norm of a whole head and all tokens, q, k and v lie in one row
    replicated=("t", "c", "n", "h", "hv", "rows", "w"),
)
