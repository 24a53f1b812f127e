"""Attention as other libraries call it: any batch dims, lengths of both sides."""

import math
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkern.interop.calling import one_batch_dim
from jaxkern.primitives.attention.attention import attention


def attend_as_jax_nn(
    op: str,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: int | tuple[int, int] | None,
    **options: Any,
) -> tuple[Array, Array]:
    """(out, lse) over any number of batch dims; causal from the first query and key on.

    Rows of queries from `query_seq_lengths` on are 0 and their lse is -inf.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if min(x.ndim for x in (query, key, value)) < 3:
        shapes = query.shape, key.shape, value.shape
        raise ValueError(
            f"{op}: query, key and value must have dims [..., rows, heads, head dim], "
            f"got shapes {shapes}."
        )
    batch, (t, n, _) = query.shape[:-3], query.shape[-3:]
    if any(x.shape[:-3] != batch for x in (key, value)):
        shapes = query.shape, key.shape, value.shape
        raise ValueError(f"{op}: batch dims differ between shapes {shapes}.")
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None and jnp.ndim(x) > query.ndim:
            raise ValueError(f"{op}: `{name}` has more dims than the scores.")
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    lengths = [
        None if x is None else jnp.broadcast_to(jnp.asarray(x), batch).reshape(-1)
        for x in (query_seq_lengths, key_value_seq_lengths)
    ]
    b = math.prod(batch)
    out, lse = attention(
        *(x.reshape(b, *x.shape[-3:]) for x in (query, key, value)),
        bias=None if bias is None else one_batch_dim(bias, batch, 3),
        mask=None if mask is None else one_batch_dim(mask, batch, 3),
        kv_lengths=lengths[1],
        q_offset=0 if is_causal or local_window_size is not None else None,
        causal=is_causal,
        window=local_window_size,
        return_lse=True,
        **options,
    )
    if lengths[0] is not None:
        is_query = (jnp.arange(t) < lengths[0][:, None])[..., None]
        out = jnp.where(is_query[..., None], out, 0)
        lse = jnp.where(is_query, lse, -jnp.inf)
    return out.reshape(*batch, *out.shape[1:]), lse.reshape(*batch, t, n)
