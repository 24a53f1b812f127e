"""State-space duality, the layer of Mamba-2  (https://arxiv.org/abs/2405.21060).

S_t = exp(step_t a) S_{t-1} + step_t x_t b_t^T,    y_t = S_t c_t

In chunks by the stages of gated_delta_chunks.py, in whose names c is a query, b a key
and step x a value: a gated delta rule that does not correct what it has stored.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.broken_numbers import (
    finite_operands,
    product_of_seen,
    told,
    turned,
)
from jaxkern.primitives.delta_rule.gated_delta_chunks import (
    Decays,
    across,
    across_gradient,
    along_chunks,
    chunk_decays,
    chunk_output,
    decay_gradient,
    from_chunks,
    in_chunks,
    of_end,
    of_ends,
    of_pairs,
    of_start,
    products,
)
from jaxkern.primitives.delta_rule.gated_delta_step import by_key_head
from jaxkern.primitives.delta_rule.packed_sequences import (
    begins_segment,
    check_packing,
    over_sequences,
    without_padding,
)
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def state_space_dual(
    x: Float[Array, "r t k*g h"],
    step: Float[Array, "r t k*g"],
    a: Float[Array, " k*g"],
    b: Float[Array, "r t k state"],
    c: Float[Array, "r t k state"],
    initial_state: Float[Array, "r k*g h state"] | None = None,
    *,
    segment_ids: Int[Array, "r t"] | None = None,
    active_length: Int[Array, " r"] | None = None,
    cu_seqlens: Int[Array, " sequences_and_1"] | None = None,
    longest: int | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Array, "r t k*g h"], Float[Array, "r k*g h state"]]:
    """Mamba-2's layer by state-space duality, SSD (https://arxiv.org/abs/2405.21060).

    Every head has a state S of h x state, which decays as a whole and is written and
    read by vectors that depend on the token:

        S_t = exp(step_t a) S_{t-1} + step_t x_t b_t^T
        y_t = S_t c_t

    `selective_scan` is the same with a decay for every number of the state. That the
    decay is one of the head makes a chunk a product of matrices, an attention without
    softmax. All arithmetic in float32 (float64 if an operand is), one rounding of each
    result. Only the operands are kept for the backward pass, which recomputes one state
    per chunk. A decoding step is a sequence of one token.

    Steps are as they count, after bias, softplus and limits. Add `skip * x` and gate y
    outside: XLA does it in one pass. Of the package `mamba_ssm` x, dt, A, B, C are x,
    step, a, b, c here; the state is `[batch, heads, h, state]` as there.

    Args:
      x: `[r, t, n, h]`, r rows of t tokens, any float dtype.
      step: `[r, t, n]`, the time step of each head, not negative.
      a: `[n]`, negative: -exp(A_log) of a checkpoint.
      b: `[r, t, k, state]`, what is written; each of k groups for n / k heads in a row.
      c: `[r, t, k, state]`, what is read.
      initial_state: `[r, n, h, state]`, or None for zeros.
      segment_ids: `[r, t]` int: where the id changes the state begins anew, so that
        sequences packed in one row do not see each other.
      active_length: `[r]` int, may be traced: tokens from there on are padding. They
        may hold anything, do not touch the state, and give zeros.
      cu_seqlens: `[sequences + 1]` int, where each sequence of the one row, r = 1,
        begins and the last ends, may be traced; in the place of segment_ids and
        active_length. States are then `[sequences, n, h, state]`.
      longest: tokens of the longest sequence, static, default t. What a longer one has
        behind them does not enter its state and gives NaN.
      chunk_size: tokens per chunk, at least 1.

    Returns:
      y: `[r, t, n, h]`, dtype of x.
      final_state: `[r, n, h, state]`, dtype of initial_state, else float32 (float64).

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: an option out of range.

    Example:
      >>> x, step = jnp.ones((1, 3, 1, 1)), jnp.ones((1, 3, 1))
      >>> a, b = -jnp.ones(1), jnp.ones((1, 3, 1, 1))
      >>> y, state = jaxkern.state_space_dual(x, step, a, b, b)
      >>> y[0, :, 0, 0]  # y_t = exp(-1) y_{t-1} + 1
      Array([1.   , 1.368, 1.503], dtype=float32)
    """
    if chunk_size < 1:
        raise ValueError(
            f"state_space_dual: `chunk_size` is {chunk_size}. It counts tokens: 1 or "
            "more."
        )
    packing = (segment_ids, active_length, cu_seqlens, longest)
    check_packing(state_space_dual_p, (x, step, a, b, c, None, None), *packing)
    if cu_seqlens is not None:

        def rule(x, step, b, c, **options):
            return state_space_dual(x, step, a, b, c, chunk_size=chunk_size, **options)

        token = (x, step, b, c)
        return over_sequences(rule, token, initial_state, cu_seqlens, longest)
    if active_length is not None:
        x, step, b, c = without_padding((x, step, b, c), active_length)
    starts = None
    if segment_ids is not None:
        starts = begins_segment(segment_ids)
        if active_length is not None:  # ids may change in the padding
            [starts] = without_padding((starts,), active_length)
    operands = (x, step, a, b, c, initial_state, starts)
    return state_space_dual_p(*operands, chunk_size=int(chunk_size))


class Chunks(NamedTuple):
    """The operands in chunks; the last one is filled up with zeros, which keep S."""

    query: jax.Array  # [b c k i h], h is the state's dim
    key: jax.Array  # [b c k i h]
    value: jax.Array  # [b c k g i v]
    g: jax.Array  # [b c k g i]
    state: jax.Array  # [b k g h v]


def chunks_of(x, step, a, b, c, state, starts, chunk_size) -> Chunks:
    given = [y for y in (x, step, a, b, c, state) if y is not None]
    dtype = jnp.result_type(jnp.float32, *given)
    t, k = b.shape[1:3]
    heads, size = (k, x.shape[2] // max(k, 1)), min(chunk_size, max(t, 1))
    x, step, a, b, c = (y.astype(dtype) for y in (x, step, a, b, c))
    g = step * a
    if starts is not None:
        g = jnp.where(starts[..., None], -jnp.inf, g)
    query, key = (in_chunks(y, size, (k,)) for y in (c, b))
    value, g = (in_chunks(y, size, heads) for y in (step[..., None] * x, g))
    if state is None:  # sharded as the operands are
        zeros = jnp.zeros_like(jnp.einsum("bckih,bckgiv->bkghv", key, value))
        state, _ = same_manual_axes([zeros, key])
    else:
        state = jnp.swapaxes(by_key_head(state.astype(dtype), k), -1, -2)
    return Chunks(query, key, value, g, state)


def states_of(x: Chunks, d: Decays):
    """The state before each chunk, and the last one."""
    written = jnp.einsum("bckih,bckgiv->bckghv", x.key, of_end(d, x.value))

    def chunk(state, operands):
        d, written = operands
        return across(d, state) + written, state

    final, states = along_chunks(chunk, x.state, (of_ends(d), written))
    return states, final


class DualOperands(NamedTuple):
    x: Float[Array, "r t k*g h"]
    step: Float[Array, "r t k*g"]
    a: Float[Array, " k*g"]
    b: Float[Array, "r t k state"]
    c: Float[Array, "r t k state"]
    initial_state: Float[Array, "r k*g h state"] | None
    starts: Bool[Array, "r t"] | None


def state_space_dual_reference(
    o: DualOperands,
    *,
    chunk_size: int,
) -> tuple[Float[Array, "r t k*g h"], Float[Array, "r k*g h state"]]:
    packed = o.starts is not None
    chunks, broken_query, _ = finite_operands(chunks_of(*o, chunk_size), packed)
    d = chunk_decays(chunks.g, packed)
    states, final = states_of(chunks, d)
    query, key, value, *_ = chunks
    y = chunk_output(query, key, value, states, d, 1.0)
    y = told(broken_query, y)
    final = heads_of(final, (o.x.shape[0], *o.x.shape[2:], o.b.shape[3]))
    kept = final.dtype if o.initial_state is None else o.initial_state.dtype
    return from_chunks(y, o.x, heads=2), final.astype(kept)


def heads_of(state, shape):
    """`[b k g h v]` as `[r n v h]`."""
    return jnp.swapaxes(state, -1, -2).reshape(shape)


def state_space_dual_bwd_reference(
    o: DualOperands,
    dy: Float[Array, "r t k*g h"],
    dfinal_state: Float[Array, "r k*g h state"],
    *,
    chunk_size: int,
) -> tuple[
    Float[Array, "r t k*g h"],
    Float[Array, "r t k*g"],
    Float[Array, " k*g"],
    Float[Array, "r t k state"],
    Float[Array, "r t k state"],
    Float[Array, "r k*g h state"] | None,
]:
    make = functools.partial(chunks_of, starts=o.starts, chunk_size=chunk_size)
    chunks, pull = jax.vjp(make, *o[:-1])
    k, group, size = chunks.value.shape[2:5]
    dtype = chunks.value.dtype
    do = in_chunks(dy.astype(dtype), size, (k, group))
    dstate = jnp.swapaxes(by_key_head(dfinal_state.astype(dtype), k), -1, -2)
    return pull(chunk_gradients(chunks, do, dstate, o.starts is not None))


def chunk_gradients(x: Chunks, do, dstate, packed: bool) -> Chunks:
    """Of all that is in chunks, given dL/dy in chunks and dL/dS of the last state.

    The backward pass of docs/design/gated_delta_rule.md with w = 0 and T = 1.
    """
    x, broken_query, broken_token = finite_operands(x, packed)
    do, d = told(broken_token, told(broken_query, do)), chunk_decays(x.g, packed)
    states, _ = states_of(x, d)
    read_by = jnp.einsum("bckih,bckgiv->bckghv", x.query, of_start(d, do))

    def chunk(dstate, operands):
        d, read_by = operands
        return across(d, dstate) + read_by, dstate

    dfirst, dstates = along_chunks(chunk, dstate, (of_ends(d), read_by), reverse=True)
    qk = products(x.query, x.key, d)
    dqk = of_pairs(d, do, x.value)
    read = of_start(d, jnp.einsum("bckgiv,bckghv->bckgih", do, states))
    stored = of_end(d, jnp.einsum("bckgiv,bckghv->bckgih", x.value, dstates))
    dvalue = of_end(d, jnp.einsum("bckih,bckghv->bckgiv", x.key, dstates))
    scores = jnp.swapaxes(qk * d.between, -1, -2)
    dvalue += product_of_seen(scores, do, turned(d.sees.tokens))
    dg = decay_gradient(
        pairs=dqk * qk,
        from_start=jnp.einsum("bckgih,bckih->bckgi", read, x.query),
        to_end=jnp.einsum("bckgih,bckih->bckgi", stored, x.key),
        across=across_gradient(d, states, dstates),
    )
    dquery = read.sum(3) + jnp.einsum("bckgij,bckjh->bckih", dqk, x.key)
    dkey = stored.sum(3) + jnp.einsum("bckgij,bckih->bckjh", dqk, x.query)
    return Chunks(dquery, dkey, dvalue, dg, dfirst)


state_space_dual_p = kernel_primitive(
    state_space_dual_reference,
    bwd=state_space_dual_bwd_reference,
    # each state needs the one before it, and y is a sum over the state
    replicated=("t", "state"),
)
