"""Several sequences in one row: which token belongs to which, and where each begins."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.family import KernelPrimitive


@check_arguments
def segment_ids_from_cu_seqlens(
    cu_seqlens: Int[Array, " sequences_and_1"], length: int
) -> Int[Array, "1 t"]:
    """Segment ids of sequences packed one after the other.

    Args:
      cu_seqlens: `[sequences + 1]` int, where each sequence begins and the last ends:
        `[0, 3, 7]` for sequences of 3 and 4 tokens. May be traced.
      length: t, static, at least cu_seqlens[-1].

    Returns:
      `[1, t]` int32: 0 for tokens of the first sequence, 1 for the second and so on;
      tokens after the last sequence have an id of their own.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> jaxkern.segment_ids_from_cu_seqlens(jnp.array([0, 3, 5]), 6)
      Array([[0, 0, 0, 1, 1, 2]], dtype=int32)
    """
    ends = jnp.asarray(cu_seqlens)[1:]
    tokens = jnp.arange(length, dtype=ends.dtype)
    return jnp.searchsorted(ends, tokens, side="right")[None].astype(jnp.int32)


def begins_segment(segment_ids: Int[Array, "b t"]) -> Bool[Array, "b t"]:
    """Whether a token follows one of another segment. The first of a row does not."""
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    return segment_ids != before


def rows_of_sequences(
    x: Shaped[Array, "1 t ..."], cu_seqlens: Int[Array, " sequences_and_1"], length: int
) -> Shaped[Array, "sequences length ..."]:
    """A packed row with each sequence in a row of its own, anything behind its end."""
    token = jnp.asarray(cu_seqlens)[:-1, None] + jnp.arange(length)
    return jnp.take(x[0], token, axis=0, mode="clip")


def sequences_in_a_row(
    rows: Shaped[Array, "sequences length ..."],
    cu_seqlens: Int[Array, " sequences_and_1"],
    t: int,
) -> Shaped[Array, "1 t ..."]:
    """The inverse: zeros outside of the sequences, NaN for what was cut off a row."""
    starts, token = jnp.asarray(cu_seqlens), jnp.arange(t)
    count, length = rows.shape[:2]
    sequence = segment_ids_from_cu_seqlens(cu_seqlens, t)[0]
    place = token - starts[jnp.minimum(sequence, count - 1)]
    flat = jnp.where(place < length, sequence * length + place, count * length)
    packed = (token >= starts[0]) & (token < starts[-1])
    flat = jnp.where(packed, flat, 0)  # no NaN that `jax_debug_nans` would meet
    x = jnp.take(rows.reshape(-1, *rows.shape[2:]), flat, axis=0, mode="fill")
    return jnp.where(packed.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)[None]


def check_packing(
    p: KernelPrimitive,
    operands: Sequence[Any],
    segment_ids: Int[Array, "b t"] | None,
    active_length: Int[Array, " b"] | None,
    cu_seqlens: Int[Array, " sequences_and_1"] | None,
    longest: int | None,
) -> None:
    """Whether what says how rows are packed fits the operands of p and each other.

    A mask would be broadcast with an operand of other dims, so these are checked here.
    """
    if segment_ids is None and active_length is None and cu_seqlens is None:
        return
    p.check(*operands)
    op, rows = p.name, jnp.shape(operands[0])[:2]
    if cu_seqlens is not None and (
        rows[0] != 1 or segment_ids is not None or active_length is not None
    ):
        raise ValueError(
            f"{op}: `cu_seqlens` is of one packed row, and excludes segment_ids and "
            f"active_length; got {rows[0]} rows."
        )
    if longest is not None and longest < 1:
        raise ValueError(f"{op}: `longest` is {longest}. It counts tokens: 1 or more.")
    expected = {
        "segment_ids": (segment_ids, rows),
        "active_length": (active_length, rows[:1]),
    }
    for name, (x, shape) in expected.items():
        if x is not None and jnp.shape(x) != shape:
            raise TypeError(
                f"{op}: `{name}` must have shape {shape}, got {jnp.shape(x)}."
            )


def without_padding(
    operands: Sequence[Shaped[Array, "b t ..."]], active_length: Int[Array, " b"]
) -> list[Shaped[Array, "b t ..."]]:
    """The operands with zeros from the active length on."""
    b, t = operands[0].shape[:2]
    padding = jnp.arange(t) >= jnp.asarray(active_length)[:, None]
    return [
        jnp.where(padding.reshape(b, t, *(1,) * (x.ndim - 2)), x.dtype.type(0), x)
        for x in operands
    ]


def over_sequences(
    rule: Callable,
    operands: Sequence[Shaped[Array, "1 t ..."]],
    initial_state: Shaped[Array, "sequences ..."] | None,
    cu_seqlens: Int[Array, " sequences_and_1"],
    longest: int | None,
) -> tuple[Shaped[Array, "1 t ..."], Shaped[Array, "sequences ..."]]:
    """`rule` over the sequences of a packed row, each with a state of its own."""
    t = operands[0].shape[1]
    length = t if longest is None else longest
    rows = [rows_of_sequences(x, cu_seqlens, length) for x in operands]
    lengths = jnp.minimum(jnp.diff(jnp.asarray(cu_seqlens)), length)
    out, state = rule(*rows, initial_state=initial_state, active_length=lengths)
    return sequences_in_a_row(out, cu_seqlens, t), state
