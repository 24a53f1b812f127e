"""Attention and its gradients by blocks of query rows, which bounds the scores held.

`attend` and `attend_bwd` are the mathematics of one block.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxkern.primitives.attention.attend import (
    attend_bwd,
    score_dtype,
    without_rest,
)
from jaxkern.primitives.attention.operands import AttentionGradients
from jaxkern.primitives.attention.query_blocks import (
    join_rows,
    rows_at_once,
    split_rows,
)
from jaxkern.primitives.call import same_manual_axes


def first_positions(q_offset, query, key):
    """Position of query row 0, `[b]`, or `[1]` for the default."""
    if q_offset is None:
        return jnp.full((1,), key.shape[1] - query.shape[1], jnp.int32)
    return q_offset


def by_rows(
    f, query, key, value, kv_lengths, q_offset, *, bias, mask, q_segment_ids, **rest
) -> Any:
    """(out, lse[, tail]) of f, `attend` or `attend_fwd`."""
    rows = dict(query=query, bias=bias, mask=mask, q_segment_ids=q_segment_ids)
    value = without_rest(value, kv_lengths)
    whole = dict(rest, key=key, value=value, kv_lengths=kv_lengths)
    q_offset = first_positions(q_offset, query, key)
    block = rows_at_once(query, key)
    if block >= query.shape[1]:
        return f(**rows, **whole, q_offset=q_offset)
    blocks, shared = split_rows(rows, block)

    def step(_, start_and_rows):
        start, rows = start_and_rows
        at = dict(q_offset=q_offset + start, first_row=start)
        return None, f(**rows, **shared, **whole, **at)

    _, parts = lax.scan(step, None, blocks)
    names = ("out", "lse", "tail")[: len(parts)]
    return tuple(
        join_rows(x, name, query) for x, name in zip(parts, names, strict=True)
    )


def gradients_by_rows(
    query,
    key,
    value,
    kv_lengths,
    q_offset,
    *,
    bias,
    mask,
    q_segment_ids,
    sinks,
    lse,
    dout,
    dlse,
    **rest,
) -> AttentionGradients:
    """`attend_bwd` of each block; what belongs to the keys is summed over them."""
    rows: dict[str, Any] = dict(
        query=query, bias=bias, mask=mask, q_segment_ids=q_segment_ids
    )
    rows |= dict(lse=lse, dout=dout, dlse=dlse)
    whole: dict[str, Any] = dict(
        rest,
        key=without_rest(key, kv_lengths),
        value=without_rest(value, kv_lengths),
        kv_lengths=kv_lengths,
        sinks=sinks,
    )
    q_offset = first_positions(q_offset, query, key)
    block = rows_at_once(query, key)
    if block >= query.shape[1]:
        grads = attend_bwd(**rows, **whole, q_offset=q_offset)
    else:
        blocks, shared = split_rows(rows, block)
        summed = dict(key=key, value=value, sinks=sinks, bias=shared.get("bias"))
        summed = {name: x for name, x in summed.items() if x is not None}

        def step(sums, start_and_rows):
            start, rows = start_and_rows
            at = dict(q_offset=q_offset + start, first_row=start)
            part = attend_bwd(**rows, **shared, **whole, **at)
            sums = {name: total + part.pop(name) for name, total in sums.items()}
            return sums, part

        dtype = score_dtype(query, key)
        zeros = [jnp.zeros_like(x, dtype) for x in summed.values()]  # sharded as x
        *zeros, _ = same_manual_axes([*zeros, query])
        sums, parts = lax.scan(step, dict(zip(summed, zeros, strict=True)), blocks)
        grads = sums | {name: join_rows(g, name, query) for name, g in parts.items()}
    return AttentionGradients(
        grads["query"].astype(query.dtype),
        grads["key"].astype(key.dtype),
        grads["value"].astype(value.dtype),
        None if bias is None else grads["bias"].astype(bias.dtype),
        None if sinks is None else grads["sinks"].astype(sinks.dtype),
    )
