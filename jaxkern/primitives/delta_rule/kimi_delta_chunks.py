"""The chunk form of Kimi delta attention: its stages, forward and backward.

Symbols and derivation are those of docs/design/kimi_delta_attention.md. c is the chunk,
i and j are tokens of it: query and key are [b c k 1 i h], what belongs to the g value
heads of a key head [b c k g i ...].
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.delta_rule.broken_numbers import (
    ALL,
    Sees,
    all_finite,
    finite_operands,
    product_of_seen,
    rows_seen,
    seen,
    sight,
    told,
    turned,
)
from jaxkern.primitives.delta_rule.gated_delta_chunks import along_chunks, in_chunks
from jaxkern.primitives.delta_rule.gated_delta_step import by_key_head
from jaxkern.primitives.delta_rule.gated_delta_step import decayed as decayed_state
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


def sight_of(g, packed: bool) -> Sees:
    """A token forgets what stands before it where no channel keeps any of it."""
    return sight((jnp.exp(g) == 0).all(-1)) if packed else ALL


def decayed(query, key, g, sees: Sees) -> Decayed:
    """Every decay is the exponential of a sum of g, never of a difference.

    So nothing overflows, g = -inf is a factor 0, and a small decay keeps its digits
    behind a large one.
    """
    from_start = rows_seen(sees.start, jnp.exp(up_to(g)))
    to_end = rows_seen(sees.end, jnp.exp(after(g)))
    qk, kk = decayed_products([query, key], key, g)
    return Decayed(
        query * from_start,
        key * from_start,
        key * to_end,
        from_start[..., -1, :],
        seen(sees.tokens, qk),
        seen(sees.tokens, kk),
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


def written(x: Chunks, d: Decayed, sees: Sees) -> Written:
    beta = x.beta[..., None]
    inverse = unit_lower_inverse_reference(jnp.tril(beta * d.kk, -1))
    inverse = seen(sees.tokens, inverse)
    w = rows_seen(sees.start, inverse @ (beta * d.erase))
    return Written(inverse, w, product_of_seen(inverse, beta * x.value, sees.tokens))


def of_ends(sees: Sees):
    """Without what pairs of tokens see: all that a walk along chunks takes."""
    return sees._replace(tokens=None)


def kept_across(sees: Sees, across, state):
    """The state through a chunk, 0 where its end does not see its start."""
    whole = None if sees.start is None else sees.start[..., -1:]
    return rows_seen(whole, across[..., None] * state)


def chunk_states(d: Decayed, y: Written, sees: Sees, state):
    """The state before each chunk, the corrections v_new = u - w S, the last state."""

    def step(state, chunk):
        w, u, store, across, sees = chunk
        v_new = u - rows_seen(sees.start, w @ state)
        added = jnp.swapaxes(store, -1, -2) @ rows_seen(sees.end, v_new)
        return kept_across(sees, across, state) + added, (state, v_new)

    chunks = (y.w, y.u, d.store, d.across, of_ends(sees))
    final, (states, v_new) = along_chunks(step, state, chunks)
    return states, v_new, final


def chunk_output(x: Chunks, scale, packed: bool = False):
    """(out, final state) of all chunks."""
    x, broken_query, _ = finite_operands(x, packed)
    sees = sight_of(x.g, packed)
    d = decayed(x.query, x.key, x.g, sees)
    states, v_new, final = chunk_states(d, written(x, d, sees), sees, x.state)
    within = product_of_seen(d.qk, v_new, sees.tokens)
    out = scale * (rows_seen(sees.start, d.read @ states) + within)
    return told(broken_query, out), final


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
    state = decayed_state(jnp.exp(g)[..., None], state)
    error = value - jnp.einsum("bkghv,bkh->bkgv", state, key)
    state = state + jnp.einsum("bkh,bkgv->bkghv", key, beta[..., None] * error)
    return state, scale * jnp.einsum("bkghv,bkh->bkgv", state, query)


def chunk_gradients(x: Chunks, do, dstate, packed: bool = False) -> Chunks:
    """Gradients of all operands, for a loss with do = scale dL/dout and dL/dS."""
    x, broken_query, broken_token = finite_operands(x, packed)
    do = told(broken_token, told(broken_query, do))
    sees = sight_of(x.g, packed)
    take = functools.partial(decayed, sees=sees)
    d, pull = jax.vjp(take, x.query, x.key, x.g)
    y = written(x, d, sees)
    states, v_new, _ = chunk_states(d, y, sees, x.state)
    dstates, dv_new, dstate = chunk_dstates(d, y, sees, do, dstate)
    # v_new = T r with r = beta (v - erase S): dA = -tril(dr v_new^T, -1)
    seen_by = turned(sees.tokens)
    dr = product_of_seen(jnp.swapaxes(y.inverse, -1, -2), dv_new, seen_by)
    beta = x.beta[..., None]
    da = seen(sees.tokens, -jnp.tril(dr @ jnp.swapaxes(v_new, -1, -2), -1))
    erased = rows_seen(sees.start, dr @ jnp.swapaxes(states, -1, -2))
    of_decayed = Decayed(
        rows_seen(sees.start, do @ jnp.swapaxes(states, -1, -2)),
        -beta * erased,
        rows_seen(sees.end, v_new @ jnp.swapaxes(dstates, -1, -2)),
        seen(
            None if sees.start is None else sees.start[..., -1:],
            jnp.sum(dstates * states, -1),
        ),
        seen(sees.tokens, do @ jnp.swapaxes(v_new, -1, -2)),
        beta * da,
    )
    if packed:
        broken = broken_tokens(x, of_decayed, sees)
        dquery, dkey, dg = pull(without(of_decayed, broken))
        of_keys = broken.any(3, keepdims=True)
        dquery, dkey, dg = told(of_keys, dquery), told(of_keys, dkey), told(broken, dg)
    else:
        dquery, dkey, dg = pull(of_decayed)
    dbeta = jnp.sum(dr * x.value, -1) - jnp.sum(erased * d.erase, -1)
    dbeta += jnp.sum(da * d.kk, -1)
    return Chunks(dquery, dkey, beta * dr, dg, dbeta, dstate)


def broken_tokens(x: Chunks, of: Decayed, sees: Sees):
    """Tokens whose sequence has what is not finite, or becomes so on the way: `[i]`.

    What pulls the gradients back sums over tokens, whatever sequence they are of.
    """
    rows = (of.read, of.erase, of.store, of.qk, of.kk, x.query**2, x.key**2)
    rows += of.read * x.query, of.erase * x.key, of.store * x.key
    for left, pairs in (x.query, of.qk), (x.key, of.kk):
        rows += largest_terms(left, x.key, jnp.abs(pairs))
    broken = functools.reduce(jnp.logical_or, (~all_finite(a) for a in rows))
    broken |= ~all_finite(of.across)[..., None]  # the chunk is of one sequence
    same = sees.tokens | jnp.swapaxes(sees.tokens, -1, -2)
    return jnp.any(same & broken[..., None, :], -1)


def largest_terms(left, right, pairs):
    """What the decays of pairs get, were no decay below 1, and no sign negative."""
    of_left = left * (pairs @ jnp.abs(right))
    return of_left, right * (jnp.swapaxes(pairs, -1, -2) @ jnp.abs(left))


def without(of: Decayed, broken) -> Decayed:
    """0 for tokens of broken sequences."""
    rows = {
        name: jnp.where(broken[..., None], 0, x)
        for name, x in of._asdict().items()
        if name != "across"
    }
    return Decayed(across=jnp.where(broken[..., -1:], 0, of.across), **rows)


def chunk_dstates(d: Decayed, y: Written, sees: Sees, do, dstate):
    """D after each chunk, dv_new = qk^T do + store D, and D before the first."""

    def step(dstate, chunk):
        local, read, store, across, w, do, sees = chunk
        dv_new = local + rows_seen(sees.end, store @ dstate)
        before = kept_across(sees, across, dstate)
        before += jnp.swapaxes(read, -1, -2) @ rows_seen(sees.start, do)
        before -= jnp.swapaxes(w, -1, -2) @ rows_seen(sees.start, dv_new)
        return before, (dstate, dv_new)

    scores = jnp.swapaxes(d.qk, -1, -2)
    local = product_of_seen(scores, do, turned(sees.tokens))
    chunks = (local, d.read, d.store, d.across, y.w, do, of_ends(sees))
    first, (dstates, dv_new) = along_chunks(step, dstate, chunks, reverse=True)
    return dstates, dv_new, first
