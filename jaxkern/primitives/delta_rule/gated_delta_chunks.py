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
from jaxkern.primitives.delta_rule.broken_numbers import (
    ALL,
    Sees,
    finite_operands,
    product_of_seen,
    rows_seen,
    seen,
    sight,
    told,
    turned,
)
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


class Decays(NamedTuple):
    """Of a chunk; 0 where a token between forgets."""

    from_start: jax.Array  # [i], from the chunk's start to i
    between: jax.Array  # [i j], from j to i
    to_end: jax.Array  # [j], from j to the chunk's end
    sees: Sees


def chunk_decays(g, packed: bool = False) -> Decays:
    """Each is the exponential of a sum of g, not of a difference of running sums.

    The difference loses small decays beside a large one and is NaN at g = -inf.
    """
    token, sees = jnp.arange(g.shape[-1]), sight(jnp.exp(g) == 0) if packed else ALL
    later = token[:, None] > token
    sums = lax.cumsum(jnp.where(later, g[..., None], 0), axis=g.ndim - 1)
    between = jnp.where(token[:, None] >= token, jnp.exp(sums), 0)
    between = seen(sees.tokens, between)
    from_start = seen(sees.start, jnp.exp(lax.cumsum(g, axis=g.ndim - 1)))
    return Decays(from_start, between, between[..., -1, :], sees)


def chunk_kkt(key, beta, d: Decays):
    """A_ij = beta_i (k_i . k_j) between_ij for j < i: what i corrects of j."""
    return jnp.tril(beta[..., None] * d.between * products(key, key, d), -1)


def products(x, y, d: Decays):
    """x_i . y_j as `[b c k g i j]`, or g = 1; 0 where i does not see j."""
    both = jnp.einsum("bckih,bckjh->bckij", x, y)[:, :, :, None]
    return seen(d.sees.tokens, both)


def chunk_inverse(key, beta, d: Decays):
    """T = (I + A)^-1."""
    inverse = unit_lower_inverse_reference(chunk_kkt(key, beta, d))
    return seen(d.sees.tokens, inverse)


def recompute_w_u(inverse, key, value, beta, d: Decays):
    """w = T (beta from_start k) and u = T (beta v), T = (I + A)^-1."""
    weights = inverse * (beta * d.from_start)[..., None, :]
    weights = rows_seen(d.sees.start, weights)
    w = jnp.einsum("bckgij,bckjh->bckgih", weights, key)
    return w, product_of_seen(inverse, beta[..., None] * value, d.sees.tokens)


def of_start(d: Decays, x):
    """from_start_i x_i, 0 where i does not see the start, whatever x_i is."""
    return rows_seen(d.sees.start, d.from_start[..., None] * x)


def of_end(d: Decays, x):
    """to_end_j x_j, 0 where the end does not see j, whatever x_j is."""
    return rows_seen(d.sees.end, d.to_end[..., None] * x)


def across(d: Decays, state):
    """from_start_C S, 0 where the end does not see the start, whatever S is."""
    whole = None if d.sees.start is None else d.sees.start[..., -1:]
    return rows_seen(whole, d.from_start[..., -1:, None] * state)


def of_ends(d: Decays):
    """Without what pairs of tokens have: all that a walk along chunks takes."""
    return d._replace(between=None, sees=d.sees._replace(tokens=None))


def along_chunks(step, first, arrays, reverse=False):
    """`lax.scan` over the second dim: (last carry, the others stacked there)."""
    chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
    last, found = lax.scan(step, first, chunks, reverse=reverse)
    return last, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)


def chunk_states(key, w, u, d: Decays, state):
    """The state before each chunk, v_new = u - w S, and the final state."""

    def step(state, chunk):
        key, w, u, d = chunk
        corrected = jnp.einsum("bkgih,bkghv->bkgiv", w, state)
        v_new = u - rows_seen(d.sees.start, corrected)
        written = jnp.einsum("bkih,bkgiv->bkghv", key, of_end(d, v_new))
        return across(d, state) + written, (state, v_new)

    final, (states, v_new) = along_chunks(step, state, (key, w, u, of_ends(d)))
    return states, v_new, final


def chunk_output(query, key, v_new, states, d: Decays, scale):
    """out = scale (from_start (q S) + (q k^T between) v_new)."""
    before = jnp.einsum("bckih,bckghv->bckgiv", query, states)
    scores = products(query, key, d) * d.between
    within = product_of_seen(scores, v_new, d.sees.tokens)
    return scale * (of_start(d, before) + within)


# The stages of the backward pass, for a loss with do = scale dL/dout and D = dL/dS.


def chunk_gradients(x: Chunks, do, dstate, packed: bool = False) -> Chunks:
    """Gradients of all operands, in chunks."""
    x, broken_query, broken_token = finite_operands(x, packed)
    query, key, value, g, beta, state = x
    do, d = told(broken_token, told(broken_query, do)), chunk_decays(g, packed)
    seen_by = turned(d.sees.tokens)
    inverse = chunk_inverse(key, beta, d)
    w, u = recompute_w_u(inverse, key, value, beta, d)
    states, v_new, _ = chunk_states(key, w, u, d, state)
    qk, kk = products(query, key, d), products(key, key, d)
    scores = jnp.swapaxes(qk * d.between, -1, -2)
    dv_local = product_of_seen(scores, do, seen_by)
    dstates, dv_new, dstate = chunk_dstates(x, w, do, dv_local, d, dstate)
    # v_new = T r with r = beta (v - from_start S^T k): dA = -tril(dr v_new^T, -1)
    dr = product_of_seen(jnp.swapaxes(inverse, -1, -2), dv_new, seen_by)
    dqk = of_pairs(d, do, v_new)
    dkk = -jnp.tril(of_pairs(d, dr, v_new), -1)
    # what the three products of a state and a token give back to the token, [i h]
    read = of_start(d, jnp.einsum("bckgiv,bckghv->bckgih", do, states))
    erased = of_start(d, jnp.einsum("bckgiv,bckghv->bckgih", dr, states))
    stored = of_end(d, jnp.einsum("bckgiv,bckghv->bckgih", v_new, dstates))

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
        across=across_gradient(d, states, dstates),
    )
    return Chunks(dquery, dkey, beta[..., None] * dr, dg, dbeta, dstate)


def of_pairs(d: Decays, x, y):
    """between_ij (x_i . y_j), 0 where i does not see j."""
    both = d.between * jnp.einsum("bckgiv,bckgjv->bckgij", x, y)
    return seen(d.sees.tokens, both)


def across_gradient(d: Decays, states, dstates):
    """from_start_C <D, S>, the derivative in the decay across the chunk's logarithm."""
    both = d.from_start[..., -1] * jnp.sum(dstates * states, (-2, -1))
    return both if d.sees.start is None else jnp.where(d.sees.start[..., -1], both, 0)


def chunk_dstates(x: Chunks, w, do, dv_local, d: Decays, dstate):
    """D after each chunk, dv_new = dv_local + to_end (k D), and D before the first."""

    def step(dstate, chunk):
        query, key, w, do, dv_local, d = chunk
        stored = jnp.einsum("bkih,bkghv->bkgiv", key, dstate)
        dv_new = dv_local + of_end(d, stored)
        read = jnp.einsum("bkih,bkgiv->bkghv", query, of_start(d, do))
        of_state = rows_seen(d.sees.start, dv_new)
        erased = jnp.einsum("bkgih,bkgiv->bkghv", w, of_state)
        return across(d, dstate) + read - erased, (dstate, dv_new)

    arrays = (x.query, x.key, w, do, dv_local, of_ends(d))
    first, (dstates, dv_new) = along_chunks(step, dstate, arrays, reverse=True)
    return dstates, dv_new, first


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
