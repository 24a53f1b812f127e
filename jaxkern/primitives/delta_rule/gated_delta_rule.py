"""Gated delta rule: a linear memory that forgets and corrects itself, in chunks.

Recurrence and chunk form of https://arxiv.org/abs/2412.06464, on the WY representation
of https://arxiv.org/abs/2406.06484. Both passes are derived in
docs/design/gated_delta_rule.md, whose symbols are the names used here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.delta_rule.gated_delta_step import (
    HeadOrder,
    by_key_head,
    default_scale,
    delta_step,
    head_order,
)
from jaxkern.primitives.delta_rule.packed_sequences import (
    begins_segment,
    rows_of_sequences,
    sequences_in_a_row,
)
from jaxkern.primitives.delta_rule.unit_lower_inverse import (
    unit_lower_inverse_reference,
)
from jaxkern.primitives.kernel_primitive import kernel_primitive

BACKWARD_CHUNK = 64  # of the recurrent form, which has no chunk of its own


def gated_delta_rule(
    query: Float[Array, "b t k h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k*g hv"],
    g: Float[Array, "b t k*g"],
    beta: Float[Array, "b t k*g"],
    initial_state: Float[Array, "b k*g h hv"] | None = None,
    *,
    segment_ids: Int[Array, "b t"] | None = None,
    active_length: Int[Array, " b"] | None = None,
    cu_seqlens: Int[Array, " sequences_and_1"] | None = None,
    longest: int | None = None,
    scale: float | None = None,
    gqa: HeadOrder = "block",
    chunk_size: int = 64,
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b k*g h hv"]]:
    """The gated delta rule over a sequence (https://arxiv.org/abs/2412.06464).

    Per value head, with a state S of h x hv that maps keys to values:

        S_t   = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
        out_t = scale S_t^T q_t

    computed `chunk_size` tokens at a time by matrix products, with a state only between
    chunks; `chunk_size=1` runs the recurrence itself. Both are the same function up to
    rounding, for any t. All arithmetic in float32 (float64 if an operand is), one
    rounding of each result. Only the operands are kept for the backward pass, which
    recomputes one state per chunk and runs chunk by chunk too.

    Conventions that differ between systems:

    | here                                  | elsewhere                                |
    |---------------------------------------|------------------------------------------|
    | g is a log-decay, g <= 0              | `log_decay_from_positive` for exp(-g)    |
    | query is scaled inside, h ** -0.5     | `scale=1.0` if it is scaled already      |
    | state is [b, n, h, hv]                | transpose [b, n, hv, h] of llama.cpp     |
    | value head i reads key head i // g    | `gqa="tiled"`: i % k, llama.cpp's order  |
    | query and key are taken as they are   | `l2_norm` them first, as Qwen3-Next does |

    A token with g = -inf forgets all before it. `segment_ids` does this where the id
    changes, so that sequences packed in one row do not see each other:
    `initial_state` enters the first and `final_state` leaves the last of a row.

    With `cu_seqlens` every sequence of a packed row has a state of its own, in and out.
    Each is then computed in a row of `longest` tokens, so memory and work are those of
    sequences * longest tokens.

    Args:
      query, key: `[b, t, k, h]`, any float dtype, k key heads.
      value: `[b, t, n, hv]`, n = k*g value heads.
      g: `[b, t, n]`, log-decay; see `compute_g_beta`.
      beta: `[b, t, n]`, write strength, in [0, 1] ([0, 2] with negative eigenvalues).
      initial_state: `[b, n, h, hv]`, or None for zeros.
      segment_ids: `[b, t]` int, equal for the tokens of one sequence; see
        `segment_ids_from_cu_seqlens`.
      active_length: `[b]` int, may be traced: tokens from there on are padding. They
        may hold anything, do not touch the state, and give zeros.
      cu_seqlens: `[sequences + 1]` int, where each sequence of the one row, b = 1,
        begins and the last ends, may be traced; in the place of segment_ids and
        active_length. `initial_state` is then `[sequences, n, h, hv]`.
      longest: tokens of the longest sequence, static, default t. What a longer one has
        behind them does not enter its state and gives NaN.
      scale: of the query, default h ** -0.5.
      gqa: which key head value head i reads: "block" i // g, "tiled" i % k.
      chunk_size: tokens per chunk, at least 1.

    Returns:
      out: `[b, t, n, hv]`, dtype of value; zeros behind the last sequence.
      final_state: `[b, n, h, hv]`, with cu_seqlens `[sequences, n, h, hv]`; dtype of
        initial_state, else float32 (float64).

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: an option out of range.
    """
    if chunk_size < 1:
        raise ValueError(
            f"gated_delta_rule: `chunk_size` is {chunk_size}. It counts tokens: 1 or "
            "more."
        )
    b, t, k = (*jnp.shape(key), 1, 1, 1)[:3]
    if cu_seqlens is not None:
        if b != 1 or segment_ids is not None or active_length is not None:
            raise ValueError(
                "gated_delta_rule: `cu_seqlens` is of one packed row, and excludes "
                f"segment_ids and active_length; got {b} rows."
            )
        length = t if longest is None else longest
        operands = (query, key, value, g, beta)
        out, state = gated_delta_rule(
            *(rows_of_sequences(x, cu_seqlens, length) for x in operands),
            initial_state=initial_state,
            active_length=jnp.minimum(jnp.diff(jnp.asarray(cu_seqlens)), length),
            scale=scale,
            gqa=gqa,
            chunk_size=chunk_size,
        )
        return sequences_in_a_row(out, cu_seqlens, t), state
    order = head_order("gated_delta_rule", gqa, k)
    value, g, beta = (order(x, 2) for x in (value, g, beta))
    if initial_state is not None:
        initial_state = order(initial_state, 1)
    if active_length is not None:
        check_shape("active_length", active_length, (b,))
        padding = jnp.arange(t) >= jnp.asarray(active_length)[:, None]
        query, key, value, g, beta = (
            jnp.where(padding.reshape(b, t, *(1,) * (jnp.ndim(x) - 2)), 0, x)
            for x in (query, key, value, g, beta)
        )
    if segment_ids is not None:
        check_shape("segment_ids", segment_ids, (b, t))
        g = jnp.where(begins_segment(segment_ids)[..., None], -jnp.inf, g)
    out, state = gated_delta_rule_p(
        query,
        key,
        value,
        g,
        beta,
        initial_state,
        scale=default_scale(key) if scale is None else float(scale),
        chunk_size=int(chunk_size),
    )
    return order(out, 2, back=True), order(state, 1, back=True)


def check_shape(name, x, shape):
    if jnp.shape(x) != shape:
        raise TypeError(
            f"gated_delta_rule: `{name}` must have shape {shape}, got {jnp.shape(x)}."
        )


# References. Inside, c is the chunk, i and j are tokens of it: query and key are
# [b c k i h], what belongs to the g value heads of a key head [b c k g i ...].


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


def gated_delta_rule_reference(
    query: Float[Array, "b t k h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k*g hv"],
    g: Float[Array, "b t k*g"],
    beta: Float[Array, "b t k*g"],
    initial_state: Float[Array, "b k*g h hv"] | None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b k*g h hv"]]:
    x = chunks_of(query, key, value, g, beta, initial_state, chunk_size)
    if chunk_size == 1:
        out, state = recurrence(x, scale)
    else:
        from_start, between, to_end = chunk_decays(x.g)
        inverse = unit_lower_inverse_reference(chunk_kkt(x.key, x.beta, between))
        w, u = recompute_w_u(inverse, x.key, x.value, x.beta, from_start)
        states, v_new, state = chunk_states(x.key, w, u, from_start, to_end, x.state)
        out = chunk_output(x.query, x.key, v_new, states, from_start, between, scale)
    b, n, hv = value.shape[0], *value.shape[2:]
    kept = state.dtype if initial_state is None else initial_state.dtype
    state = state.reshape(b, n, key.shape[3], hv).astype(kept)
    return from_chunks(out, value, heads=2), state


def gated_delta_rule_bwd_reference(
    query: Float[Array, "b t k h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k*g hv"],
    g: Float[Array, "b t k*g"],
    beta: Float[Array, "b t k*g"],
    initial_state: Float[Array, "b k*g h hv"] | None,
    dout: Float[Array, "b t k*g hv"],
    dfinal_state: Float[Array, "b k*g h hv"],
    *,
    scale: float,
    chunk_size: int,
) -> tuple[
    Float[Array, "b t k h"],
    Float[Array, "b t k h"],
    Float[Array, "b t k*g hv"],
    Float[Array, "b t k*g"],
    Float[Array, "b t k*g"],
    Float[Array, "b k*g h hv"] | None,
]:
    chunk_size = BACKWARD_CHUNK if chunk_size == 1 else chunk_size
    x = chunks_of(query, key, value, g, beta, initial_state, chunk_size)
    k, group, size = x.value.shape[2:5]
    do = scale * in_chunks(dout.astype(x.value.dtype), size, (k, group))
    dstate = by_key_head(dfinal_state.astype(x.state.dtype), k)
    grads = chunk_gradients(x, do, dstate)
    dinitial = None
    if initial_state is not None:
        dinitial = grads.state.reshape(initial_state.shape)
        dinitial = dinitial.astype(initial_state.dtype)
    return (
        from_chunks(grads.query, query, heads=1),
        from_chunks(grads.key, key, heads=1),
        from_chunks(grads.value, value, heads=2),
        from_chunks(grads.g, g, heads=2),
        from_chunks(grads.beta, beta, heads=2),
        dinitial,
    )


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


gated_delta_rule_p = kernel_primitive(
    gated_delta_rule_reference,
    bwd=gated_delta_rule_bwd_reference,
    # each state needs the one before it; S^T k runs over h, columns are independent
    replicated=("t", "h"),
)
