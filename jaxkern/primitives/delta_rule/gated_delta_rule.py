"""Gated delta rule: a linear memory that forgets and corrects itself, in chunks.

Recurrence and chunk form of https://arxiv.org/abs/2412.06464, on the WY representation
of https://arxiv.org/abs/2406.06484. Both passes are derived in
docs/design/gated_delta_rule.md; gated_delta_chunks.py has their stages.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.broken_numbers import finite_operands, told
from jaxkern.primitives.delta_rule.gated_delta_chunks import (
    chunk_decays,
    chunk_gradients,
    chunk_inverse,
    chunk_output,
    chunk_states,
    chunks_of,
    gradients_of_chunks,
    loss_in_chunks,
    recompute_w_u,
    recurrence,
    result_of_chunks,
)
from jaxkern.primitives.delta_rule.gated_delta_step import (
    HeadOrder,
    default_scale,
    head_order,
)
from jaxkern.primitives.delta_rule.packed_sequences import (
    begins_segment,
    check_packing,
    over_sequences,
    without_padding,
)
from jaxkern.primitives.kernel_primitive import kernel_primitive

BACKWARD_CHUNK = 64  # of the recurrent form, which has no chunk of its own


@check_arguments
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
    rounding of each result; GPU kernels of 16-bit operands multiply those in 16 bits
    and add in float32. Only the operands are kept for the backward pass, which
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
      chunk_size: tokens per chunk, at least 1. GPU kernels have chunks of 64; only 1
        chooses another form there.

    Returns:
      out: `[b, t, n, hv]`, dtype of value; zeros outside of all sequences.
      final_state: `[b, n, h, hv]`, with cu_seqlens `[sequences, n, h, hv]`; dtype of
        initial_state, else float32 (float64).

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: an option out of range.

    Example:
      >>> key = jnp.eye(2)[jnp.array([0, 1, 0])][None, :, None]  # [b, t, heads, h]
      >>> value = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
      >>> g, beta = jnp.zeros((1, 3, 1)), jnp.ones((1, 3, 1))
      >>> out, state = jaxkern.gated_delta_rule(key, key, value, g, beta, scale=1.0)
      >>> out[0, :, 0, 0]  # each key reads what it has just stored
      Array([1., 2., 3.], dtype=float32)
      >>> state[0, 0]  # key 0 has 3 in the place of 1
      Array([[3.],
             [2.]], dtype=float32)
    """
    if chunk_size < 1:
        raise ValueError(
            f"gated_delta_rule: `chunk_size` is {chunk_size}. It counts tokens: 1 or "
            "more."
        )
    operands = (query, key, value, g, beta)
    packing = (segment_ids, active_length, cu_seqlens, longest)
    check_packing(gated_delta_rule_p, (*operands, None), *packing)
    if cu_seqlens is not None:
        options = dict(scale=scale, gqa=gqa, chunk_size=chunk_size)
        rule = functools.partial(gated_delta_rule, **options)
        return over_sequences(rule, operands, initial_state, cu_seqlens, longest)
    order = head_order("gated_delta_rule", gqa, (*jnp.shape(key), 1, 1, 1)[2])
    value, g, beta = (order(x, 2) for x in (value, g, beta))
    if initial_state is not None:
        initial_state = order(initial_state, 1)
    if segment_ids is not None:
        g = jnp.where(begins_segment(segment_ids)[..., None], -jnp.inf, g)
    if active_length is not None:  # after the ids, which may change in the padding
        operands = (query, key, value, g, beta)
        query, key, value, g, beta = without_padding(operands, active_length)
    out, state = gated_delta_rule_p(
        query,
        key,
        value,
        g,
        beta,
        initial_state,
        scale=default_scale(key) if scale is None else float(scale),
        chunk_size=int(chunk_size),
        **({} if segment_ids is None else {"packed": True}),
    )
    return order(out, 2, back=True), order(state, 1, back=True)


class GatedDeltaOperands(NamedTuple):
    query: Float[Array, "b t k h"]
    key: Float[Array, "b t k h"]
    value: Float[Array, "b t k*g hv"]
    g: Float[Array, "b t k*g"]
    beta: Float[Array, "b t k*g"]
    initial_state: Float[Array, "b k*g h hv"] | None


def gated_delta_rule_reference(
    o: GatedDeltaOperands,
    *,
    scale: float,
    chunk_size: int,
    packed: bool = False,
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b k*g h hv"]]:
    x = chunks_of(*o, chunk_size)
    if chunk_size == 1:
        out, state = recurrence(x, scale)
    else:
        x, broken_query, _ = finite_operands(x, packed)
        d = chunk_decays(x.g, packed)
        inverse = chunk_inverse(x.key, x.beta, d)
        w, u = recompute_w_u(inverse, x.key, x.value, x.beta, d)
        states, v_new, state = chunk_states(x.key, w, u, d, x.state)
        out = chunk_output(x.query, x.key, v_new, states, d, scale)
        out = told(broken_query, out)
    return result_of_chunks(out, state, o.key, o.value, o.initial_state)


def gated_delta_rule_bwd_reference(
    o: GatedDeltaOperands,
    dout: Float[Array, "b t k*g hv"],
    dfinal_state: Float[Array, "b k*g h hv"],
    *,
    scale: float,
    chunk_size: int,
    packed: bool = False,
) -> GatedDeltaOperands:
    x = chunks_of(*o, BACKWARD_CHUNK if chunk_size == 1 else chunk_size)
    grads = chunk_gradients(x, *loss_in_chunks(x, dout, dfinal_state, scale), packed)
    return GatedDeltaOperands._make(gradients_of_chunks(grads, o, heads=1))


gated_delta_rule_p = kernel_primitive(
    gated_delta_rule_reference,
    bwd=gated_delta_rule_bwd_reference,
    # each state needs the one before it; S^T k runs over h, columns are independent
    replicated=("t", "h"),
    of_reference=("packed",),  # it leaves out what a token does not see
)
