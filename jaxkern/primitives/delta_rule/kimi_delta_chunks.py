"""The chunk form of Kimi delta attention: its stages, forward and backward.

Symbols and derivation are those of docs/design/kimi_delta_attention.md. c is the chunk,
i and j are tokens of it: query and key are [b c k 1 i h], what belongs to the g value
heads of a key head [b c k g i ...].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.delta_rule.gated_delta_chunks import in_chunks
from jaxkern.primitives.delta_rule.gated_delta_step import by_key_head
from jaxkern.primitives.delta_rule.unit_lower_inverse import (
    unit_lower_inverse_reference,
)

FORGOTTEN = -1000.0  # its exponential is 0 in float64 too, and 0 times it a number
CHUNKS = -5  # the dim c of all that is [b c k g i ...]


class Chunks(NamedTuple):
    """The operands in chunks, in the dtype of the arithmetic.

    The last chunk is filled up with zeros: beta = 0 and g = 0 leave the state as it is.
    """

    query: jax.Array  # [b c k 1 i h]
    key: jax.Array  # [b c k 1 i h]
    value: jax.Array  # [b c k g i v]
    g: jax.Array  # [b c k g i h]
    beta: jax.Array  # [b c k g i]
    state: jax.Array  # [b k g h v], before the first chunk


class Decayed(NamedTuple):
    """What a chunk takes of query, key and g; all of it finite for any g <= 0."""

    read: jax.Array  # [i h], queries decayed from the chunk's start
    erase: jax.Array  # [i h], keys decayed from the chunk's start
    store: jax.Array  # [i h], keys decayed to the chunk's end
    across: jax.Array  # [h], decay from start to end
    qk: jax.Array  # [i j], products of queries and the keys up to them, decayed between
    kk: jax.Array  # [i j], likewise of keys


def chunks_of(query, key, value, g, beta, state, chunk_size) -> Chunks:
    given = [y for y in (query, key, value, g, beta, state) if y is not None]
    dtype = jnp.result_type(jnp.float32, *given)
    t, k = key.shape[1:3]
    heads, size = (k, value.shape[2] // max(k, 1)), min(chunk_size, max(t, 1))
    query, key = (in_chunks(y.astype(dtype), size, (k, 1)) for y in (query, key))
    value, g, beta = (in_chunks(y.astype(dtype), size, heads) for y in (value, g, beta))
    if state is None:  # sharded as the operands are
        zeros = jnp.zeros_like(jnp.einsum("bckgih,bckgiv->bkghv", g, value))
        state, _ = same_manual_axes([zeros, key])
    else:
        state = by_key_head(state.astype(dtype), k)
    return Chunks(query, key, value, g, beta, state)


def decayed(query, key, g) -> Decayed:
    """Every decay is the exponential of a sum of g, never of a difference.

    So nothing overflows, g = -inf is a factor 0, and a small decay keeps its digits
    behind a large one.
    """
    from_start = jnp.exp(up_to(g))
    qk, kk = decayed_products([query, key], key, g)
    return Decayed(
        query * from_start,
        key * from_start,
        key * jnp.exp(after(g)),
        from_start[..., -1, :],
        qk,
        kk,
    )


def up_to(g):
    """The sums of g over the tokens up to each one."""
    return sums(jnp.tri(g.shape[-2], dtype=g.dtype), g)


def after(g):
    """The sums of g over the tokens behind each one."""
    return sums(jnp.triu(jnp.ones((g.shape[-2],) * 2, g.dtype), 1), g)


def sums(of, g):
    """One product, for which XLA takes less time than for a scan."""
    g = jnp.maximum(g, FORGOTTEN)
    return jnp.matmul(of, g, precision=lax.Precision.HIGHEST)


def decayed_products(xs, y, g):
    """sum over h of x_ih y_jh e^{sum of g_lh, j < l <= i} for j <= i, else 0: [i j].

    Of every x. A row of the second half and a column of the first meet at the middle:
    one decays from there, the other to there, and the block is a product of matrices.
    Each half is done likewise.
    """
    c = g.shape[-2]
    fill = (1 << max(c - 1, 0).bit_length()) - c  # to a power of two
    widths = [(0, 0)] * (g.ndim - 2) + [(0, fill), (0, 0)]
    *xs, y, g = (jnp.pad(a, widths) for a in (*xs, y, g))
    return [p[..., :c, :c] for p in products_from_halves(xs, y, g)]


def products_from_halves(xs, y, g):
    c = g.shape[-2]
    if c == 1:  # a token and itself: nothing decays between
        shape = jnp.broadcast_shapes(y.shape, g.shape)[:-1]
        alone = (jnp.sum(x * y, -1) for x in xs)
        return [jnp.broadcast_to(p, shape)[..., None] for p in alone]
    m = c // 2
    to_middle = y[..., :m, :] * jnp.exp(after(g[..., :m, :]))
    from_middle = jnp.exp(up_to(g[..., m:, :]))
    # further chunks, not a further dim: XLA multiplies no arrays of 8 dims on a CPU
    halves = (
        jnp.concatenate([a[..., :m, :], a[..., m:, :]], CHUNKS) for a in (*xs, y, g)
    )
    *x_halves, y_halves, g_halves = halves
    inner = products_from_halves(x_halves, y_halves, g_halves)
    found = []
    for x, both in zip(xs, inner, strict=True):
        first, second = jnp.split(both, 2, CHUNKS)
        below = (x[..., m:, :] * from_middle) @ jnp.swapaxes(to_middle, -1, -2)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        lower = jnp.concatenate([below, second], -1)
        found.append(jnp.concatenate([upper, lower], -2))
    return found


class Written(NamedTuple):
    """What the corrections d of a chunk are made of: d = T beta (v - erase S)."""

    inverse: jax.Array  # T = (I + beta kk)^-1 below the diagonal, [i j]
    w: jax.Array  # T (beta erase), [i h]
    u: jax.Array  # T (beta v), [i v]


def written(x: Chunks, d: Decayed) -> Written:
    beta = x.beta[..., None]
    inverse = unit_lower_inverse_reference(jnp.tril(beta * d.kk, -1))
    return Written(inverse, inverse @ (beta * d.erase), inverse @ (beta * x.value))


def chunk_states(d: Decayed, y: Written, state):
    """The state before each chunk, the corrections v_new = u - w S, the last state."""

    def step(state, chunk):
        w, u, store, across = chunk
        v_new = u - w @ state
        new = across[..., None] * state + jnp.swapaxes(store, -1, -2) @ v_new
        return new, (state, v_new)

    chunks = [jnp.moveaxis(a, 1, 0) for a in (y.w, y.u, d.store, d.across)]
    final, (states, v_new) = lax.scan(step, state, chunks)
    return jnp.moveaxis(states, 0, 1), jnp.moveaxis(v_new, 0, 1), final


def chunk_output(x: Chunks, scale):
    """(out, final state) of all chunks."""
    d = decayed(x.query, x.key, x.g)
    states, v_new, final = chunk_states(d, written(x, d), x.state)
    return scale * (d.read @ states + d.qk @ v_new), final


def recurrence(x: Chunks, scale):
    """(out, final state), one token after the other: the definition."""

    def step(state, token):
        return delta_step(state, token, scale)

    keys = (x.query[:, :, :, 0, 0], x.key[:, :, :, 0, 0])
    tokens = (*keys, x.value[..., 0, :], x.g[..., 0, :], x.beta[..., 0])
    state, out = lax.scan(step, x.state, [jnp.moveaxis(a, 1, 0) for a in tokens])
    return jnp.moveaxis(out, 0, 1)[..., None, :], state


def delta_step(state, token, scale):
    """(new state, out) of one token; state `[b k g h v]`, query `[b k h]`."""
    query, key, value, g, beta = token
    state = jnp.exp(g)[..., None] * state
    error = value - jnp.einsum("bkghv,bkh->bkgv", state, key)
    state = state + jnp.einsum("bkh,bkgv->bkghv", key, beta[..., None] * error)
    return state, scale * jnp.einsum("bkghv,bkh->bkgv", state, query)


def chunk_gradients(x: Chunks, do, dstate) -> Chunks:
    """Gradients of all operands, for a loss with do = scale dL/dout and dL/dS."""
    d, pull = jax.vjp(decayed, x.query, x.key, x.g)
    y = written(x, d)
    states, v_new, _ = chunk_states(d, y, x.state)
    dstates, dv_new, dstate = chunk_dstates(d, y, do, dstate)
    # v_new = T r with r = beta (v - erase S): dA = -tril(dr v_new^T, -1)
    beta, dr = x.beta[..., None], jnp.swapaxes(y.inverse, -1, -2) @ dv_new
    da = -jnp.tril(dr @ jnp.swapaxes(v_new, -1, -2), -1)
    dread = do @ jnp.swapaxes(states, -1, -2)
    erased = dr @ jnp.swapaxes(states, -1, -2)
    dquery, dkey, dg = pull(
        Decayed(
            dread,
            -beta * erased,
            v_new @ jnp.swapaxes(dstates, -1, -2),
            jnp.sum(dstates * states, -1),
            do @ jnp.swapaxes(v_new, -1, -2),
            beta * da,
        )
    )
    dbeta = jnp.sum(dr * x.value, -1) - jnp.sum(erased * d.erase, -1)
    dbeta += jnp.sum(da * d.kk, -1)
    return Chunks(dquery, dkey, beta * dr, dg, dbeta, dstate)


def chunk_dstates(d: Decayed, y: Written, do, dstate):
    """D after each chunk, dv_new = qk^T do + store D, and D before the first."""
    chunks = (jnp.swapaxes(d.qk, -1, -2) @ do, d.read, d.store, d.across, y.w, do)

    def step(dstate, chunk):
        local, read, store, across, w, do = chunk
        dv_new = local + store @ dstate
        before = across[..., None] * dstate + jnp.swapaxes(read, -1, -2) @ do
        before -= jnp.swapaxes(w, -1, -2) @ dv_new
        return before, (dstate, dv_new)

    moved = [jnp.moveaxis(a, 1, 0) for a in chunks]
    first, (dstates, dv_new) = lax.scan(step, dstate, moved, reverse=True)
    return jnp.moveaxis(dstates, 0, 1), jnp.moveaxis(dv_new, 0, 1), first
