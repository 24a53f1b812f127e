"""Selective scan, the state-space layer of Mamba  (https://arxiv.org/abs/2312.00752).

h_t = exp(delta_t a) h_{t-1} + delta_t b_t x_t,    y_t = sum over the state of c_t h_t
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import check_dims
from jaxkern.primitives.delta_rule.packed_sequences import (
    begins_segment,
    without_padding,
)
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def selective_scan(
    x: Float[Array, "b t d"],
    delta: Float[Array, "b t d"],
    a: Float[Array, "d state"],
    b: Float[Array, "b t ... state"],
    c: Float[Array, "b t ... state"],
    skip: Float[Array, " d"] | None = None,
    gate: Float[Array, "b t d"] | None = None,
    delta_bias: Float[Array, " d"] | None = None,
    initial_state: Float[Array, "b d state"] | None = None,
    *,
    delta_softplus: bool = False,
    segment_ids: Int[Array, "b t"] | None = None,
    active_length: Int[Array, " b"] | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Array, "b t d"], Float[Array, "b d state"]]:
    """Mamba's selective scan (S6), algorithm 2 of https://arxiv.org/abs/2312.00752.

    Every channel has a state h of its own, which decays and is written and read by
    vectors that depend on the token:

        step_t = delta_t + delta_bias, through softplus if `delta_softplus`
        h_t    = exp(step_t a) h_{t-1} + step_t b_t x_t
        y_t    = (sum over the state of c_t h_t + skip x_t) silu(gate_t)

    computed `chunk_size` tokens at a time by a parallel prefix, with a state only
    between chunks. All arithmetic in float32 (float64 if an operand is), one rounding
    of each result. Only the operands are kept for the backward pass, which recomputes
    one state per chunk. A decoding step is a sequence of one token.

    Time is the second dim of all operands and the channels come before the state.
    Transpose the `[b, d, t]` and `[b, state, t]` of the CUDA package `mamba_ssm`; its
    A, B, C, D, z are a, b, c, skip, gate here.

    Args:
      x: `[b, t, d]`, any float dtype, t of any size.
      delta: `[b, t, d]`, the time step of each channel.
      a: `[d, state]`, negative: -exp(A_log) of a checkpoint.
      b: `[b, t, state]`, what is written; one for all channels, or of `[b, t, groups,
        state]` one for each run of d / groups channels.
      c: `[b, t, state]`, what is read, or of `[b, t, groups, state]`.
      skip: `[d]`, or None for none.
      gate: `[b, t, d]`, or None for none.
      delta_bias: `[d]`, or None for zeros.
      initial_state: `[b, d, state]`, or None for zeros.
      delta_softplus: whether delta is a step only after softplus.
      segment_ids: `[b, t]` int: where the id changes the state begins anew, so that
        sequences packed in one row do not see each other.
      active_length: `[b]` int, may be traced: tokens from there on are padding. They
        may hold anything, do not touch the state, and give zeros.
      chunk_size: tokens per chunk, at least 1. Memory is chunk_size b d state.

    Returns:
      y: `[b, t, d]`, dtype of x.
      final_state: `[b, d, state]`, dtype of initial_state, else float32 (float64).

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: `chunk_size` is below 1.

    Example:
      >>> x, delta = jnp.ones((1, 3, 1)), jnp.ones((1, 3, 1))  # [b, t, d]
      >>> a, b = -jnp.ones((1, 1)), jnp.ones((1, 3, 1))
      >>> y, state = jaxkern.selective_scan(x, delta, a, b, b)
      >>> y[0, :, 0]  # y_t = exp(-1) y_{t-1} + 1
      Array([1.   , 1.368, 1.503], dtype=float32)
    """
    if chunk_size < 1:
        raise ValueError(
            f"selective_scan: `chunk_size` is {chunk_size}. It counts tokens: 1 or "
            "more."
        )
    rows, t = (*jnp.shape(x), 1, 1)[:2]
    groups = num_groups(b, c, jnp.shape(x))
    if segment_ids is not None or active_length is not None:
        # a mask would be broadcast with operands of other dims
        one = b if groups is None else b[:, :, 0], c if groups is None else c[:, :, 0]
        selective_scan_p.check(x, delta, a, *one, skip, gate, delta_bias, None, None)
    if active_length is not None:
        check_shape("active_length", active_length, (rows,))
        padding = (jnp.arange(t) >= jnp.asarray(active_length)[:, None])[..., None]
        delta = jnp.where(padding, -jnp.inf if delta_softplus else 0, delta)
        if delta_bias is not None and not delta_softplus:
            delta, delta_bias = jnp.where(padding, 0, delta + delta_bias), None
        x = jnp.where(padding, 0, x)
        of_group = padding if groups is None else padding[..., None]
        b, c = (jnp.where(of_group, 0, y) for y in (b, c))
        gate = None if gate is None else jnp.where(padding, 0, gate)
    starts = None
    if segment_ids is not None:
        check_shape("segment_ids", segment_ids, (rows, t))
        starts = begins_segment(segment_ids)
        if active_length is not None:  # ids may change in the padding
            [starts] = without_padding((starts,), active_length)
    options = dict(delta_softplus=bool(delta_softplus), chunk_size=int(chunk_size))
    scan = functools.partial(selective_scan_p, **options)
    operands = (x, delta, a, b, c, skip, gate, delta_bias, initial_state)
    if groups is None:
        return scan(*operands, starts)
    return scan_groups(scan, operands, starts, groups)


def num_groups(b, c, shape: tuple[int, ...]) -> int | None:
    """How many groups b and c have, which divide the channels; None without them."""
    if jnp.ndim(b) != 4 and jnp.ndim(c) != 4:
        return None
    groups = {jnp.shape(y)[2] if jnp.ndim(y) == 4 else None for y in (b, c)}
    count, d = groups.pop(), (*shape, 1, 1, 1)[2]
    if groups or not count or d % count:
        raise TypeError(
            "selective_scan: `b` and `c` must both be [b t state], or [b t groups "
            f"state] with groups that divide the {d} channels of `x`, got "
            f"{jnp.shape(b)} and {jnp.shape(c)}."
        )
    return count


# where the channels, or the groups of b and c, stand among the dims of each operand
CHANNELS = (2, 2, 0, 2, 2, 0, 2, 0, 1)


def scan_groups(scan, operands, starts, groups: int):
    """The scan of each group of channels with its own b and c."""
    of_one_group = [y[:, :, 0] if i in (3, 4) else y for i, y in enumerate(operands)]
    declared = selective_scan_p.operands
    check_dims(repr(selective_scan_p), declared, (*of_one_group, starts))

    def split(i, axis, y):
        if y is None or i in (3, 4):
            return y
        shape = y.shape
        size = (groups, shape[axis] // groups)
        return jnp.reshape(y, (*shape[:axis], *size, *shape[axis + 1 :]))

    parts = [
        split(i, *pair) for i, pair in enumerate(zip(CHANNELS, operands, strict=True))
    ]
    axes = [None if y is None else n for n, y in zip(CHANNELS, operands, strict=True)]
    mapped = jax.vmap(scan, in_axes=(*axes, None), out_axes=(2, 1))
    y, state = mapped(*parts, starts)
    x, a = operands[0], operands[2]
    return y.reshape(x.shape), state.reshape(x.shape[0], *a.shape)


def check_shape(name, x, shape):
    if jnp.shape(x) != shape:
        raise TypeError(
            f"selective_scan: `{name}` must have shape {shape}, got {jnp.shape(x)}."
        )


class ScanOperands(NamedTuple):
    x: Float[Array, "b t d"]
    delta: Float[Array, "b t d"]
    a: Float[Array, "d state"]
    b: Float[Array, "b t state"]
    c: Float[Array, "b t state"]
    skip: Float[Array, " d"] | None
    gate: Float[Array, "b t d"] | None
    delta_bias: Float[Array, " d"] | None
    initial_state: Float[Array, "b d state"] | None
    starts: Bool[Array, "b t"] | None


def selective_scan_reference(
    o: ScanOperands,
    *,
    delta_softplus: bool,
    chunk_size: int,
) -> tuple[Float[Array, "b t d"], Float[Array, "b d state"]]:
    x, delta, a, b, c, skip, gate, delta_bias, initial_state, starts = o
    dtype = arithmetic(*o[:-1])
    step = time_step(delta.astype(dtype), delta_bias, delta_softplus)
    x32, a32 = x.astype(dtype), a.astype(dtype)
    chunks = [in_chunks(y, chunk_size) for y in (x32, step, b, c, starts)]
    state = first_state(x32, a32, initial_state)
    read, final, _ = scan_chunks(a32, chunks, state)
    y = gated(from_chunks(read, x), x32, skip, gate).astype(x.dtype)
    return y, final if initial_state is None else final.astype(initial_state.dtype)


def selective_scan_bwd_reference(
    o: ScanOperands,
    dy: Float[Array, "b t d"],
    dfinal_state: Float[Array, "b d state"],
    *,
    delta_softplus: bool,
    chunk_size: int,
) -> tuple[
    Float[Array, "b t d"],
    Float[Array, "b t d"],
    Float[Array, "d state"],
    Float[Array, "b t state"],
    Float[Array, "b t state"],
    Float[Array, " d"] | None,
    Float[Array, "b t d"] | None,
    Float[Array, " d"] | None,
    Float[Array, "b d state"] | None,
]:
    x, delta, a, b, c, skip, gate, delta_bias, initial_state, starts = o
    dtype = arithmetic(*o[:-1])
    step, pull_step = jax.vjp(
        lambda delta, bias: time_step(delta.astype(dtype), bias, delta_softplus),
        delta,
        delta_bias,
    )
    x32, a32 = x.astype(dtype), a.astype(dtype)
    chunks = [in_chunks(y, chunk_size) for y in (x32, step, b, c, starts)]
    state = first_state(x32, a32, initial_state)
    read, _, states = scan_chunks(a32, chunks, state)
    _, pull_gate = jax.vjp(gated, from_chunks(read, x), x32, skip, gate)
    dread, dx_skipped, dskip, dgate = pull_gate(dy.astype(dtype))
    grads, dstate = scan_chunks_back(
        a32, chunks, states, in_chunks(dread, chunk_size), dfinal_state.astype(dtype)
    )
    dx, dstep, db, dc = (from_chunks(d, x) for d in grads[:4])
    ddelta, ddelta_bias = pull_step(dstep)
    return (
        (dx + dx_skipped).astype(x.dtype),
        ddelta,
        grads[4].sum(0).astype(a.dtype),
        db.astype(b.dtype),
        dc.astype(c.dtype),
        dskip,
        dgate,
        ddelta_bias,
        None if initial_state is None else dstate.astype(initial_state.dtype),
    )


def arithmetic(*operands):
    return jnp.result_type(jnp.float32, *(y for y in operands if y is not None))


def time_step(delta, bias, softplus):
    step = delta if bias is None else delta + bias.astype(delta.dtype)
    return jax.nn.softplus(step) if softplus else step


def gated(read, x, skip, gate):
    y = read if skip is None else read + skip.astype(x.dtype) * x
    return y if gate is None else y * jax.nn.silu(gate.astype(x.dtype))


def first_state(x, a, initial_state):
    if initial_state is not None:
        return initial_state.astype(x.dtype)
    # sharded and varying as the operands are
    return same_manual_axes([jnp.zeros_like(jnp.einsum("btd,ds->bds", x, a)), x])[0]


def in_chunks(y, chunk_size):
    """`[b t ...]` as `[c i b ...]`, filled up with zeros, which leave the state."""
    if y is None:
        return None
    b, t = y.shape[:2]
    size = min(chunk_size, max(t, 1))
    count = -(-t // size)
    y = jnp.pad(y, [(0, 0), (0, count * size - t)] + [(0, 0)] * (y.ndim - 2))
    return jnp.moveaxis(y.reshape(b, count, size, *y.shape[2:]), 0, 2)


def from_chunks(y, like):
    b, t = like.shape[:2]
    y = jnp.moveaxis(y, 2, 0)
    return y.reshape(b, y.shape[1] * y.shape[2], *y.shape[3:])[:, :t]


# One chunk: decay, written and states are [i b d s].


def recurrence(decay, written, starts, state, reverse=False):
    """h_i = decay_i h_{i-1} + written_i, from `state`; i + 1 for i - 1 if reverse.

    Where a token starts anew h_{i-1} does not enter, NaN neither.
    """

    def composed(first, second):
        decay, written, starts = second
        decays, before = first[0] * decay, decay * first[1]
        if starts is not None:
            decays, before = (jnp.where(starts, 0, y) for y in (decays, before))
            starts = first[2] | starts
        return decays, before + written, starts

    elements = (decay, written, starts)
    decays, h, started = lax.associative_scan(composed, elements, reverse=reverse)
    before = decays * state
    return h + (before if started is None else jnp.where(started, 0, before))


def decay_and_write(a, x, step, b, starts):
    """(decay, written, where a token starts anew) of a chunk."""
    decay = jnp.exp(step[..., None] * a)
    if starts is not None:
        starts = starts[..., None, None]
        decay = jnp.where(starts, 0, decay)
    return decay, (step * x)[..., None] * b[:, :, None], starts


def unless_started(starts, x):
    return x if starts is None else jnp.where(starts, 0, x)


def scan_chunks(a, chunks, state):
    """c_t h_t of every token, the final state, and the state before each chunk."""

    def of_chunk(state, chunk):
        x, step, b, c, starts = chunk
        b, c = b.astype(x.dtype), c.astype(x.dtype)
        h = recurrence(*decay_and_write(a, x, step, b, starts), state)
        return h[-1], (jnp.einsum("ibds,ibs->ibd", h, c), state)

    final, (read, states) = lax.scan(of_chunk, state, chunks)
    return read, final, states


def scan_chunks_back(a, chunks, states, dread, dfinal):
    """Gradients of x, step, b, c and, for each chunk, of a; and of the first state.

    dh_t = c_t dread_t + decay_{t+1} dh_{t+1}. A decay's logarithm is step a, so what it
    gets, dh_t decay_t h_{t-1}, goes to both.
    """

    def of_chunk(dstate, chunk):
        (x, step, b, c, starts), state, dread = chunk
        b, c = b.astype(x.dtype), c.astype(x.dtype)
        decay, written, starts = decay_and_write(a, x, step, b, starts)
        h = recurrence(decay, written, starts, state)
        before = jnp.concatenate([state[None], h[:-1]])
        later_decay = jnp.concatenate([decay[1:], jnp.ones_like(decay[:1])])
        later = None
        if starts is not None:
            later = jnp.concatenate([starts[1:], jnp.zeros_like(starts[:1])])
        read = dread[..., None] * c[:, :, None]
        dh = recurrence(later_decay, read, later, dstate, reverse=True)
        dlog = unless_started(starts, dh * decay * before)
        dwritten = jnp.einsum("ibds,ibs->ibd", dh, b)
        first = None if starts is None else starts[0]
        return unless_started(first, decay[0] * dh[0]), (
            step * dwritten,
            x * dwritten + jnp.einsum("ibds,ds->ibd", dlog, a),
            jnp.einsum("ibds,ibd->ibs", dh, step * x),
            jnp.einsum("ibds,ibd->ibs", h, dread),
            jnp.einsum("ibds,ibd->ds", dlog, step),
        )

    dstate, grads = lax.scan(of_chunk, dfinal, (chunks, states, dread), reverse=True)
    return grads, dstate


selective_scan_p = kernel_primitive(
    selective_scan_reference,
    bwd=selective_scan_bwd_reference,
    # each state needs the one before it, and skip x is no sum over the state
    replicated=("t", "state"),
)
