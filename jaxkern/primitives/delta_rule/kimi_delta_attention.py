"""Kimi delta attention: a gated delta rule whose state decays by key channel.

Recurrence and chunk form of https://arxiv.org/abs/2510.26692. Both passes are derived
in docs/design/kimi_delta_attention.md; kimi_delta_chunks.py has their stages.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.gated_delta_chunks import (
    gradients_of_chunks,
    loss_in_chunks,
    result_of_chunks,
)
from jaxkern.primitives.delta_rule.gated_delta_step import default_scale
from jaxkern.primitives.delta_rule.kimi_delta_chunks import (
    chunk_gradients,
    chunk_output,
    chunks_of,
    recurrence,
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
def kimi_delta_attention(
    query: Float[Array, "b t k h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k*g hv"],
    g: Float[Array, "b t k*g h"],
    beta: Float[Array, "b t k*g"],
    initial_state: Float[Array, "b k*g h hv"] | None = None,
    *,
    segment_ids: Int[Array, "b t"] | None = None,
    active_length: Int[Array, " b"] | None = None,
    cu_seqlens: Int[Array, " sequences_and_1"] | None = None,
    longest: int | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b k*g h hv"]]:
    """Kimi delta attention, KDA, over a sequence (https://arxiv.org/abs/2510.26692).

    Per value head, with a state S of h x hv that maps keys to values, of which every
    row, a channel of the keys, has a decay of its own:

        S_t   = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
        out_t = scale S_t^T q_t

    `gated_delta_rule` is the same with one decay for all rows. `chunk_size` tokens are
    computed at a time by matrix products, with a state only between chunks;
    `chunk_size=1` runs the recurrence itself. Both are the same function up to
    rounding, for any t and any g <= 0: decays never divide by one another, so that none
    overflows. All arithmetic in float32 (float64 if an operand is), one rounding of
    each result. Only the operands are kept for the backward pass.

    Query and key are taken as they are: `l2_norm` them first, as Kimi Linear does. A
    token with g = -inf forgets all before it. `segment_ids` does this where the id
    changes, so that sequences packed in one row do not see each other: `initial_state`
    enters the first and `final_state` leaves the last of a row. With `cu_seqlens` every
    sequence of a packed row has a state of its own, in and out, and is computed in a
    row of `longest` tokens.

    Args:
      query, key: `[b, t, k, h]`, any float dtype, k key heads.
      value: `[b, t, n, hv]`, n = k*g value heads; value head i reads key head i // g.
      g: `[b, t, n, h]`, log-decay of each channel of the keys, at most 0.
      beta: `[b, t, n]`, write strength, in [0, 1].
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
      chunk_size: tokens per chunk, at least 1; powers of two are not filled up.

    Returns:
      out: `[b, t, n, hv]`, dtype of value; zeros outside of all sequences.
      final_state: `[b, n, h, hv]`, with cu_seqlens `[sequences, n, h, hv]`; dtype of
        initial_state, else float32 (float64).

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: an option out of range.

    Example:
      >>> key = jnp.eye(2)[jnp.array([0, 1, 0])][None, :, None]  # [b, t, heads, h]
      >>> value, beta = jnp.ones((1, 3, 1, 1)), jnp.ones((1, 3, 1))
      >>> g = jnp.broadcast_to(jnp.array([-1.0, 0.0]), (1, 3, 1, 2))
      >>> operands = (key + 1, key, value, g, beta)
      >>> out, state = jaxkern.kimi_delta_attention(*operands, scale=1.0)
      >>> state[0, 0]  # both keys hold their value, the first one just written
      Array([[1.],
             [1.]], dtype=float32)
      >>> out[0, :, 0, 0]  # 2 S_0 + S_1, S_0 + 2 S_1 by the decayed S_0, 2 S_0 + S_1
      Array([2.   , 2.368, 3.   ], dtype=float32)
    """
    if chunk_size < 1:
        raise ValueError(
            f"kimi_delta_attention: `chunk_size` is {chunk_size}. It counts tokens: 1 "
            "or more."
        )
    options = dict(scale=scale, chunk_size=chunk_size)
    operands = (query, key, value, g, beta)
    packing = (segment_ids, active_length, cu_seqlens, longest)
    check_packing(kimi_delta_attention_p, (*operands, None), *packing)
    if cu_seqlens is not None:
        rule = functools.partial(kimi_delta_attention, **options)
        return over_sequences(rule, operands, initial_state, cu_seqlens, longest)
    if segment_ids is not None:
        begins = begins_segment(segment_ids)[..., None, None]
        operands = (query, key, value, jnp.where(begins, -jnp.inf, g), beta)
    if active_length is not None:  # after the ids, which may change in the padding
        operands = without_padding(operands, active_length)
    scale = default_scale(key) if scale is None else float(scale)
    own: dict[str, Any] = {} if segment_ids is None else {"packed": True}
    return kimi_delta_attention_p(
        *operands, initial_state, scale=scale, chunk_size=int(chunk_size), **own
    )


class KimiDeltaOperands(NamedTuple):
    query: Float[Array, "b t k h"]
    key: Float[Array, "b t k h"]
    value: Float[Array, "b t k*g hv"]
    g: Float[Array, "b t k*g h"]
    beta: Float[Array, "b t k*g"]
    initial_state: Float[Array, "b k*g h hv"] | None


def kimi_delta_attention_reference(
    o: KimiDeltaOperands,
    *,
    scale: float,
    chunk_size: int,
    packed: bool = False,
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b k*g h hv"]]:
    x = chunks_of(*o, chunk_size)
    if chunk_size == 1:
        out, state = recurrence(x, scale)
    else:
        out, state = chunk_output(x, scale, packed)
    return result_of_chunks(out, state, o.key, o.value, o.initial_state)


def kimi_delta_attention_bwd_reference(
    o: KimiDeltaOperands,
    dout: Float[Array, "b t k*g hv"],
    dfinal_state: Float[Array, "b k*g h hv"],
    *,
    scale: float,
    chunk_size: int,
    packed: bool = False,
) -> KimiDeltaOperands:
    x = chunks_of(*o, BACKWARD_CHUNK if chunk_size == 1 else chunk_size)
    grads = chunk_gradients(x, *loss_in_chunks(x, dout, dfinal_state, scale), packed)
    return KimiDeltaOperands._make(gradients_of_chunks(grads, o, heads=2))


kimi_delta_attention_p = kernel_primitive(
    kimi_delta_attention_reference,
    bwd=kimi_delta_attention_bwd_reference,
    # each state needs the one before it; S^T k runs over h, columns are independent
    replicated=("t", "h"),
    of_reference=("packed",),  # it leaves out what a token does not see
)
