"""Causal convolution of each channel over time, with its own few taps.

The short convolution before a state-space or delta-rule layer, with its cache for
decoding  (https://arxiv.org/abs/2312.00752, https://arxiv.org/abs/2412.06464).
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import check_dims
from jaxkern.primitives.delta_rule.packed_sequences import segment_ids_from_cu_seqlens
from jaxkern.primitives.delta_rule.state_slots import step_in_pool
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive

Activation = Literal["silu"] | None


@check_arguments
def causal_conv1d(
    x: Float[Array, "b t d"],
    weight: Float[Array, "d w"],
    bias: Float[Array, " d"] | None = None,
    initial_state: Float[Array, "b past d"] | None = None,
    *,
    segment_ids: Int[Array, "b t"] | None = None,
    active_length: Int[Array, " b"] | None = None,
    cu_seqlens: Int[Array, " sequences_and_1"] | None = None,
    activation: Activation = None,
) -> tuple[Float[Array, "b t d"], Float[Array, "b past d"]]:
    """Depthwise causal convolution over time, with the inputs before as its state.

        y_t = act(bias + sum_{j < w} weight[:, j] * x_{t - (w - 1) + j})

    where x_{-(w-1)} .. x_{-1} is `initial_state`. The last tap is the present token, as
    in PyTorch, Hugging Face and llama.cpp. `final_state` is the last w - 1 inputs: the
    `initial_state` of what follows, so a sequence may be cut anywhere. Time is the
    second dim in both; transpose the caches of Hugging Face, [b, d, w], and llama.cpp,
    [b, d, w - 1].

    With `cu_seqlens` every sequence of a packed row has a state of its own, in and out,
    as in `gated_delta_rule`.

    Sums in float32 (float64 for float64 operands), one rounding.

    Source: https://arxiv.org/abs/2312.00752, https://arxiv.org/abs/2412.06464.

    Args:
      x: `[b, t, d]`, any float dtype, t of any size.
      weight: `[d, w]`, one row of w >= 1 taps per channel.
      bias: `[d]`, or None.
      initial_state: `[b, w - 1, d]`, or None for zeros.
      segment_ids: `[b, t]` int: tokens see only those of an equal id at their back, and
        `initial_state` belongs to the first; for sequences packed in one row.
      active_length: `[b]` int, may be traced: tokens from there on are padding. They
        may hold anything and do not enter `final_state`; their y means nothing.
      cu_seqlens: `[sequences + 1]` int, where each sequence of the one row, b = 1,
        begins and the last ends, may be traced; in the place of segment_ids and
        active_length. `initial_state` is then `[sequences, w - 1, d]`.
      activation: "silu" or None.

    Returns:
      y: `[b, t, d]`, dtype of x; zeros behind the last of `cu_seqlens`.
      final_state: `[b, w - 1, d]`, with cu_seqlens `[sequences, w - 1, d]`; dtype of
        initial_state, else of x.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: `activation` is neither of the two, or `cu_seqlens` beside several
        rows, segment_ids or active_length.

    Example:
      >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)  # [b, t, d]
      >>> weight = jnp.array([[10.0, 1.0]])  # the last tap is the present
      >>> y, state = jaxkern.causal_conv1d(x, weight)
      >>> y[0, :, 0], state[0, :, 0]
      (Array([ 1., 12., 23.], dtype=float32), Array([3.], dtype=float32))
    """
    if activation not in (None, "silu"):
        raise ValueError(
            f"causal_conv1d: `activation` must be 'silu' or None, got {activation!r}."
        )
    b, t, _ = (*jnp.shape(x), 1, 1, 1)[:3]
    if cu_seqlens is not None:
        if b != 1 or segment_ids is not None or active_length is not None:
            raise ValueError(
                "causal_conv1d: `cu_seqlens` is of one packed row, and excludes "
                f"segment_ids and active_length; got {b} rows."
            )
        return packed_conv1d(x, weight, bias, initial_state, cu_seqlens, activation)
    if active_length is not None:
        check_shape("active_length", active_length, (b,))
        padding = jnp.arange(t) >= jnp.asarray(active_length)[:, None]
        x = jnp.where(padding[..., None], 0, x)
    y = causal_conv1d_p(
        x, weight, bias, initial_state, segment_ids, activation=activation
    )
    past = jnp.shape(weight)[1] - 1
    return y, last_inputs(x, initial_state, segment_ids, active_length, past)


@check_arguments
def causal_conv1d_step(
    x: Float[Array, "b d"],
    weight: Float[Array, "d w"],
    bias: Float[Array, " d"] | None,
    state: Float[Array, "b past d"],
    *,
    state_indices: Int[Array, " b"] | None = None,
    activation: Activation = None,
) -> tuple[Float[Array, "b d"], Float[Array, "b past d"]]:
    """One token of `causal_conv1d`: its output and the state for the next one.

        window = (state, x), w tokens;    y = act(sum_j weight[:, j] window[j] + bias)

    With `state_indices` the states lie in a pool, `state` of `[slots, w - 1, d]`, and
    row i uses slot state_indices[i]: only these are read and written, in place where
    the pool is donated to the jitted step.

    Args:
      x: `[b, d]`, the inputs of the token, any float dtype.
      weight, bias: `[d, w]` and `[d]` or None, see `causal_conv1d`.
      state: `[b, w - 1, d]`, the inputs before, the oldest first.
      state_indices: `[b]` int, may be traced: the slot of each row. Rows with the same
        slot leave the state of any of them; outside [0, slots), -1 say, is no row: it
        gives zeros and writes nothing.
      activation: "silu" or None.

    Returns:
      y: `[b, d]`, dtype of x.
      state: `[b, w - 1, d]` with this token's inputs last, or the pool; its dtype as
        before.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: `activation` is neither of the two.

    Example:
      >>> weight = jnp.array([[10.0, 1.0]])  # the last tap is the present
      >>> x, state = jnp.array([[2.0]]), jnp.array([[[1.0]]])
      >>> y, state = jaxkern.causal_conv1d_step(x, weight, None, state)
      >>> y, state
      (Array([[12.]], dtype=float32), Array([[[2.]]], dtype=float32))
    """
    if state_indices is not None:
        b = (*jnp.shape(x), 1)[0]

        def step(rows):
            return causal_conv1d_step(x, weight, bias, rows, activation=activation)

        return step_in_pool("causal_conv1d_step", step, b, state, state_indices)
    y, state = causal_conv1d(x[:, None], weight, bias, state, activation=activation)
    return y[:, 0], state


def packed_conv1d(x, weight, bias, initial_state, cu_seqlens, activation):
    """The convolution of one packed row, and the last inputs of each sequence.

    States go between the sequences, each before its own, and what is computed there is
    left out of the result. So the kernels need to know of segments only.
    """
    declared = causal_conv1d_p.operands
    check_dims(repr(causal_conv1d_p), declared, (x, weight, bias, None, None))
    (_, t, d), past = x.shape, weight.shape[1] - 1
    starts = jnp.asarray(cu_seqlens)
    sequences = starts.shape[0] - 1
    expected = (sequences, past, d)
    if initial_state is not None and initial_state.shape != expected:
        raise TypeError(
            "causal_conv1d: `initial_state` must have a state for each sequence of "
            f"`cu_seqlens`, {expected}, got {initial_state.shape}."
        )
    ids = segment_ids_from_cu_seqlens(starts, t)
    x = jnp.where(ids[..., None] < sequences, x, 0)
    conv = functools.partial(causal_conv1d_p, activation=activation)
    if initial_state is None or not past or not sequences or not t:
        y = conv(x, weight, bias, None, ids)
    else:
        longer = segment_ids_from_cu_seqlens(
            starts + past * jnp.arange(sequences + 1, dtype=starts.dtype),
            t + past * sequences,
        )
        sequence = jnp.minimum(longer[0], sequences - 1)
        place = jnp.arange(longer.shape[1]) - starts[sequence] - past * sequence
        dtype = jnp.result_type(x, initial_state)
        tokens = jnp.take(x[0], starts[sequence] + place - past, axis=0, mode="clip")
        states = initial_state[sequence, jnp.clip(place, 0, past - 1)]
        row = jnp.where((place < past)[:, None], states.astype(dtype), tokens)
        y = conv(row[None].astype(dtype), weight, bias, None, longer).astype(x.dtype)
        kept = jnp.arange(t) + past * jnp.minimum(ids[0] + 1, sequences)
        y = jnp.take(y, kept, axis=1, mode="clip")
    y = jnp.where(ids[..., None] < sequences, y, 0)
    return y, last_of_sequences(x, initial_state, starts, past)


def last_of_sequences(x, initial_state, starts, past):
    """The last `past` inputs of each sequence of a row, its state before them."""
    if initial_state is None:
        initial_state = jnp.zeros((starts.shape[0] - 1, past, x.shape[2]), x.dtype)
    if x.shape[1] == 0:
        return initial_state
    begin, end = starts[:-1, None], starts[1:, None]
    place = end - past + jnp.arange(past)
    inputs = jnp.take(x[0], place, axis=0, mode="clip")
    before = jnp.clip(place - begin + past, 0, max(past - 1, 0))[..., None]
    states = jnp.take_along_axis(initial_state, before, axis=1, mode="clip")
    last = jnp.where((place >= begin)[..., None], inputs, states)
    return last.astype(initial_state.dtype)


def check_shape(name, x, shape):
    if jnp.shape(x) != shape:
        raise TypeError(
            f"causal_conv1d: `{name}` must have shape {shape}, got {jnp.shape(x)}."
        )


def last_inputs(x, initial_state, segment_ids, active_length, past):
    """The `past` inputs before the end, zeros where they are of another segment."""
    t = x.shape[1]

    def window(y, size):
        """`size` entries of each row from the end, or active length, of x on."""
        if active_length is None:
            return y[:, t:]
        rows = jnp.clip(jnp.asarray(active_length), 0, t)
        return jax.vmap(lambda y, at: lax.dynamic_slice_in_dim(y, at, size))(y, rows)

    last = window(with_past(x, initial_state, past), past)
    if segment_ids is not None:
        ids = window(with_past_ids(segment_ids, past + 1), past + 1)
        last = jnp.where((ids[:, 1:] == ids[:, -1:])[..., None], last, 0)
    return last.astype(x.dtype if initial_state is None else initial_state.dtype)


def with_past(x, initial_state, past):
    """The inputs from x_{-past} on, in the dtype of both."""
    if initial_state is None:
        return jnp.pad(x, ((0, 0), (past, 0), (0, 0)))
    dtype = jnp.result_type(x, initial_state)
    return jnp.concatenate([initial_state.astype(dtype), x.astype(dtype)], axis=1)


def with_past_ids(segment_ids, past):
    """Segment ids from -past on: what lies before the row is of its first segment."""
    b, t = segment_ids.shape
    first = segment_ids[:, :1] if t else jnp.zeros((b, 1), segment_ids.dtype)
    return jnp.concatenate([jnp.repeat(first, past, axis=1), segment_ids], axis=1)


def causal_conv1d_reference(
    x: Float[Array, "b t d"],
    weight: Float[Array, "d w"],
    bias: Float[Array, " d"] | None,
    initial_state: Float[Array, "b past d"] | None,
    segment_ids: Int[Array, "b t"] | None,
    *,
    activation: Activation,
) -> Float[Array, "b t d"]:
    inputs = taps(x, weight, initial_state, segment_ids)
    z = convolved(inputs, weight, bias)
    y = jax.nn.silu(z) if activation == "silu" else z
    return y.astype(x.dtype)


def causal_conv1d_bwd_reference(
    x: Float[Array, "b t d"],
    weight: Float[Array, "d w"],
    bias: Float[Array, " d"] | None,
    initial_state: Float[Array, "b past d"] | None,
    segment_ids: Int[Array, "b t"] | None,
    dy: Float[Array, "b t d"],
    *,
    activation: Activation,
) -> tuple[
    Float[Array, "b t d"],
    Float[Array, "d w"],
    Float[Array, " d"] | None,
    Float[Array, "b past d"] | None,
]:
    inputs = taps(x, weight, initial_state, segment_ids)
    dz = at_least_f32(dy)
    if activation == "silu":
        z = convolved(inputs, weight, bias)
        s = jax.nn.sigmoid(z)
        dz = dz * s * (1 + z * (1 - s))
    t, past = x.shape[1], len(inputs) - 1
    same = same_segment(segment_ids, past)
    dtaps = [dz * at_least_f32(weight)[:, j] for j in range(past + 1)]
    if same is not None:
        dtaps = [jnp.where(m, d, 0) for m, d in zip(same, dtaps, strict=True)]
    # tap j of token i read input i + j
    dinputs = functools.reduce(
        jnp.add,
        [jnp.pad(d, ((0, 0), (j, past - j), (0, 0))) for j, d in enumerate(dtaps)],
    )
    dweight = jnp.stack([(dz * tap).sum((0, 1)) for tap in inputs], axis=1)
    return (
        dinputs[:, past : past + t].astype(x.dtype),
        dweight.astype(weight.dtype),
        None if bias is None else dz.sum((0, 1)).astype(bias.dtype),
        None
        if initial_state is None
        else dinputs[:, :past].astype(initial_state.dtype),
    )


def taps(x, weight, initial_state, segment_ids):
    """What each tap sees, w arrays `[b t d]`: zeros where that is another segment."""
    t, w = x.shape[1], weight.shape[1]
    if w < 1 or (initial_state is not None and initial_state.shape[1] != w - 1):
        past = None if initial_state is None else initial_state.shape[1]
        raise TypeError(
            f"causal_conv1d: `weight` has {w} taps and `initial_state` {past} inputs. "
            "It takes w >= 1 taps and w - 1 inputs."
        )
    inputs = at_least_f32(with_past(x, initial_state, w - 1))
    seen = [inputs[:, j : j + t] for j in range(w)]
    same = same_segment(segment_ids, w - 1)
    if same is not None:
        seen = [jnp.where(m, tap, 0) for m, tap in zip(same, seen, strict=True)]
    return seen


def same_segment(segment_ids, past):
    """For each tap whether it sees the segment of its token, `[b t 1]`, or None."""
    if segment_ids is None:
        return None
    ids, t = with_past_ids(segment_ids, past), segment_ids.shape[1]
    return [(ids[:, j : j + t] == segment_ids)[..., None] for j in range(past + 1)]


def convolved(inputs, weight, bias):
    w = at_least_f32(weight)
    z = functools.reduce(jnp.add, [tap * w[:, j] for j, tap in enumerate(inputs)])
    return z if bias is None else z + at_least_f32(bias)


causal_conv1d_p = kernel_primitive(
    causal_conv1d_reference,
    bwd=causal_conv1d_bwd_reference,
    replicated=("t", "w", "past"),  # each token needs those before it
)
