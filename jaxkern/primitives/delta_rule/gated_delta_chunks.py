"""The chunk form of the gated delta rule: its stages, forward and backward.

Symbols and derivation are those of docs/design/gated_delta_rule.md. c is the chunk, i
and j are tokens of it: query and key are [b c k i h], what belongs to the g value heads
of a key head [b c k g i ...].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.delta_rule.gated_delta_step import by_key_head, delta_step
from jaxkern.primitives.delta_rule.unit_lower_inverse import (
    unit_lower_inverse_reference,
)


class Chunks(NamedTuple):
    """The operands in chunks, in the dtype of the arithmetic.

    The last chunk is filled up with zeros: beta = 0 and g = 0 leave the state as it is.
    """

    query: jax.Array  # [b c k i h]
    key: jax.Array  # [b c k i h]
    value: jax.Array  # [b c k g i v]
    g: jax.Array  # [b c k g i]
    beta: jax.Array  # [b c k g i]
    state: jax.Array  # [b k g h v], before the first chunk


def chunks_of(query, key, value, g, beta, state, chunk_size) -> Chunks:
    given = [y for y in (query, key, value, g, beta, state) if y is not None]
    dtype = jnp.result_type(jnp.float32, *given)
    t, k = key.shape[1:3]
    heads, size = (k, value.shape[2] // max(k, 1)), min(chunk_size, max(t, 1))
    query, key = (in_chunks(y.astype(dtype), size, (k,)) for y in (query, key))
    value, g, beta = (in_chunks(y.astype(dtype), size, heads) for y in (value, g, beta))
    if state is None:  # sharded as the operands are
        zeros = jnp.zeros_like(jnp.einsum("bckih,bckgiv->bkghv", key, value))
        state, _ = same_manual_axes([zeros, key])
    else:
        state = by_key_head(state.astype(dtype), k)
    return Chunks(query, key, value, g, beta, state)


def in_chunks(x, size, heads):
    """`[b t n ...]` as `[b c *heads i ...]`, filled up with zeros."""
    b, t = x.shape[:2]
    count = -(-t // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(b, count, size, *x.shape[2:])
    x = x.reshape(*x.shape[:3], *heads, *x.shape[4:])
    return jnp.moveaxis(x, 2, 2 + len(heads))


def from_chunks(x, like, heads):
    """The inverse for `heads` dims of heads, in the shape and dtype of `like`."""
    b, t, n = like.shape[:3]
    x = jnp.moveaxis(x, 2 + heads, 2)
    x = x.reshape(*x.shape[:3], n, *x.shape[3 + heads :])
    x = x.reshape(b, x.shape[1] * x.shape[2], *x.shape[3:])
    return x[:, :t].astype(like.dtype)


def loss_in_chunks(x, dout, dfinal_state, scale):
    """(scale dL/dout in the chunks of x, dL/dS by key head) of two cotangents."""
    k, group, size = x.value.shape[2:5]
    do = scale * in_chunks(dout.astype(x.value.dtype), size, (k, group))
    return do, by_key_head(dfinal_state.astype(x.state.dtype), k)


def result_of_chunks(out, state, key, value, initial_state):
    """(out, final state) of a rule whose results these are, in chunks."""
    b, n, hv = value.shape[0], *value.shape[2:]
    kept = state.dtype if initial_state is None else initial_state.dtype
    state = state.reshape(b, n, key.shape[3], hv).astype(kept)
    return from_chunks(out, value, heads=2), state


def gradients_of_chunks(grads, operands, heads):
    """Of all operands of a rule, of whose queries and keys there are `heads` dims."""
    *gradients, dstate = grads
    *operands, state = operands
    if state is not None:
        state = dstate.reshape(state.shape).astype(state.dtype)
    dims = (heads, heads, 2, 2, 2)
    return *map(from_chunks, gradients, operands, dims), state


def recurrence(x: Chunks, scale):
    """(out, final state), one token after the other: the definition."""

    def step(state, token):
        return delta_step(state, token, scale)

    tokens = [y[..., 0, :] for y in (x.query, x.key, x.value)]
    tokens += [y[..., 0] for y in (x.g, x.beta)]
    state, out = lax.scan(step, x.state, [jnp.moveaxis(y, 1, 0) for y in tokens])
    return jnp.moveaxis(out, 0, 1)[..., None, :], state


# The stages of the chunk form.


def chunk_decays(g):
    """Decays from the chunk's start to i, from j to i, and from j to the chunk's end.

    Each is the exponential of a sum of g, not of a difference of running sums, which
    loses small decays beside a large one and is NaN at g = -inf.
    """
    token = jnp.arange(g.shape[-1])
    later = token[:, None] > token
    sums = lax.cumsum(jnp.where(later, g[..., None], 0), axis=g.ndim - 1)
    between = jnp.where(token[:, None] >= token, jnp.exp(sums), 0)  # [i j]
    from_start = jnp.exp(lax.cumsum(g, axis=g.ndim - 1))
    return from_start, between, between[..., -1, :]


def chunk_kkt(key, beta, between):
    """A_ij = beta_i (k_i . k_j) between_ij for j < i: what i corrects of j."""
    return jnp.tril(beta[..., None] * products(key, key) * between, -1)


def products(x, y):
    """x_i . y_j as `[b c k 1 i j]`."""
    return jnp.einsum("bckih,bckjh->bckij", x, y)[:, :, :, None]


def recompute_w_u(inverse, key, value, beta, from_start):
    """w = T (beta from_start k) and u = T (beta v), T = (I + A)^-1."""
    weights = inverse * (beta * from_start)[..., None, :]
    w = jnp.einsum("bckgij,bckjh->bckgih", weights, key)
    u = jnp.einsum("bckgij,bckgjv->bckgiv", inverse, beta[..., None] * value)
    return w, u


def chunk_states(key, w, u, from_start, to_end, state):
    """The state before each chunk, v_new = u - w S, and the final state."""

    def step(state, chunk):
        key, w, u, from_start, to_end = chunk
        v_new = u - jnp.einsum("bkgih,bkghv->bkgiv", w, state)
        written = jnp.einsum("bkih,bkgiv->bkghv", key, to_end[..., None] * v_new)
        return from_start[..., -1:, None] * state + written, (state, v_new)

    chunks = [jnp.moveaxis(y, 1, 0) for y in (key, w, u, from_start, to_end)]
    final, (states, v_new) = lax.scan(step, state, chunks)
    return jnp.moveaxis(states, 0, 1), jnp.moveaxis(v_new, 0, 1), final


def chunk_output(query, key, v_new, states, from_start, between, scale):
    """out = scale (from_start (q S) + (q k^T between) v_new)."""
    before = jnp.einsum("bckih,bckghv->bckgiv", query, states)
    within = jnp.einsum("bckgij,bckgjv->bckgiv", products(query, key) * between, v_new)
    return scale * (from_start[..., None] * before + within)


# The stages of the backward pass, for a loss with do = scale dL/dout and D = dL/dS.


def chunk_gradients(x: Chunks, do, dstate) -> Chunks:
    """Gradients of all operands, in chunks."""
    query, key, value, g, beta, state = x
    from_start, between, to_end = chunk_decays(g)
    inverse = unit_lower_inverse_reference(chunk_kkt(key, beta, between))
    w, u = recompute_w_u(inverse, key, value, beta, from_start)
    states, v_new, _ = chunk_states(key, w, u, from_start, to_end, state)
    qk, kk = products(query, key), products(key, key)
    dv_local = jnp.einsum("bckgij,bckgiv->bckgjv", qk * between, do)
    dstates, dv_new, dstate = chunk_dstates(
        x, w, do, dv_local, from_start, to_end, dstate
    )
    # v_new = T r with r = beta (v - from_start S^T k): dA = -tril(dr v_new^T, -1)
    dr = jnp.einsum("bckgij,bckgiv->bckgjv", inverse, dv_new)
    dqk = between * jnp.einsum("bckgiv,bckgjv->bckgij", do, v_new)
    dkk = -jnp.tril(between * jnp.einsum("bckgiv,bckgjv->bckgij", dr, v_new), -1)
    # what the three products of a state and a token give back to the token, [i h]
    read = from_start[..., None] * jnp.einsum("bckgiv,bckghv->bckgih", do, states)
    erased = from_start[..., None] * jnp.einsum("bckgiv,bckghv->bckgih", dr, states)
    stored = to_end[..., None] * jnp.einsum("bckgiv,bckghv->bckgih", v_new, dstates)

    dquery = read.sum(3) + jnp.einsum("bckgij,bckjh->bckih", dqk, key)
    weighted = beta[..., None] * dkk
    dkey = (
        (stored - beta[..., None] * erased).sum(3)
        + jnp.einsum("bckgij,bckih->bckjh", dqk, query)
        + jnp.einsum("bckgij,bckjh->bckih", weighted, key)
        + jnp.einsum("bckgij,bckih->bckjh", weighted, key)
    )
    on_key = jnp.einsum("bckgih,bckih->bckgi", erased, key)
    dbeta = jnp.sum(dr * value, -1) - on_key + jnp.sum(dkk * kk, -1)
    dg = decay_gradient(
        pairs=dqk * qk + weighted * kk,
        from_start=jnp.einsum("bckgih,bckih->bckgi", read, query) - beta * on_key,
        to_end=jnp.einsum("bckgih,bckih->bckgi", stored, key),
        across=from_start[..., -1] * jnp.sum(dstates * states, (-2, -1)),
    )
    return Chunks(dquery, dkey, beta[..., None] * dr, dg, dbeta, dstate)


def chunk_dstates(x: Chunks, w, do, dv_local, from_start, to_end, dstate):
    """D after each chunk, dv_new = dv_local + to_end (k D), and D before the first."""

    def step(dstate, chunk):
        query, key, w, do, dv_local, from_start, to_end = chunk
        dv_new = dv_local + to_end[..., None] * jnp.einsum(
            "bkih,bkghv->bkgiv", key, dstate
        )
        before = (
            from_start[..., -1:, None] * dstate
            + jnp.einsum("bkih,bkgiv->bkghv", query, from_start[..., None] * do)
            - jnp.einsum("bkgih,bkgiv->bkghv", w, dv_new)
        )
        return before, (dstate, dv_new)

    arrays = (x.query, x.key, w, do, dv_local, from_start, to_end)
    chunks = [jnp.moveaxis(y, 1, 0) for y in arrays]
    first, (dstates, dv_new) = lax.scan(step, dstate, chunks, reverse=True)
    return jnp.moveaxis(dstates, 0, 1), jnp.moveaxis(dv_new, 0, 1), first


def decay_gradient(pairs, from_start, to_end, across):
    """dg_l: the sum over all that decays at l, given the derivatives in each logarithm.

    From a token j < l to a token i >= l or to the chunk's end, and from the chunk's
    start to a token i >= l or across to its end.
    """
    axis = from_start.ndim - 1
    token = jnp.arange(pairs.shape[-1])
    from_j = lax.cumsum(pairs, axis=axis, reverse=True) + to_end[..., None, :]  # [l j]
    from_tokens = jnp.sum(jnp.where(token < token[:, None], from_j, 0), -1)
    from_state = lax.cumsum(from_start, axis=axis, reverse=True) + across[..., None]
    return from_tokens + from_state
