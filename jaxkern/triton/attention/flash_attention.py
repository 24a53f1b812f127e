"""Attention of many queries, forward and backward, without a matrix of scores.

One launch forward, out and lse (forward_kernel.py), and three backward: lse and delta,
laid out by head (gradient_rows.py), dk and dv (keys_kernel.py), dq (queries_kernel.py).

Exponentials are of base 2, with the scale folded into their argument. q, k, v, out and
their gradients stay in [b t n h]; beside them only lse and delta are written, O(t).
What a program holds is read once; what it walks over, by every program that sees it,
from the L2 cache: heads are taken in sections whose share it holds.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.triton.attention.bias_gradient import with_bias_gradient
from jaxkern.triton.attention.forward_kernel import flash_attention_kernel
from jaxkern.triton.attention.gradient_rows import gradient_rows
from jaxkern.triton.attention.keys_kernel import flash_attention_bwd_keys_kernel
from jaxkern.triton.attention.problem import (
    LOG2_E,
    PADDING,
    factor,
    operands_and_constants,
    turned,
)
from jaxkern.triton.attention.queries_kernel import flash_attention_bwd_queries_kernel
from jaxkern.triton.attention.tile_sizes import (
    forward_sizes,
    key_sizes,
    piece,
    query_sizes,
    sizes_of,
)
from jaxkern.triton.triton_call import (
    like,
    max_shared_bytes,
    sparse_call,
)
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

MAX_HEAD_DIM = 512
MAX_GRADIENT_DIM = 256
MAX_WIDE_DIM = 256  # where XLA's products of float32 are not faster, nor as exact
LARGE_TILES = 160 * 1024  # bytes of the tiles of wider heads than 128
FEW_SCORES = 2**17  # the latency of the tiles is longer than XLA's launches
FEW_QUERIES = 8  # up to here one reads the keys, and the arithmetic does not matter
CACHED_BYTES = 2**25  # of the L2 cache, for the keys and values of one section


def slower(query: Any, key: Any, value: Any, **_: Any) -> str | None:
    b, t, n, h = query.shape
    scores = b * t * n * key.shape[1]
    if scores <= FEW_SCORES:
        return f"{scores} scores are few"
    if query.dtype == jnp.float32 and max(h, value.shape[3]) > MAX_WIDE_DIM:
        return f"float32 at head dims of {h} and {value.shape[3]}"
    return None


def unsupported(
    query: Any, key: Any, value: Any, scale: float, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    b, t, n, h = query.shape
    s, hv = value.shape[1], value.shape[3]
    if t <= FEW_QUERIES:
        return f"{t} queries are no more than {FEW_QUERIES}: reading the keys decides"
    if max(h, hv) > MAX_HEAD_DIM:
        return f"head dims {h} and {hv} are above {MAX_HEAD_DIM}"
    if max(h, hv) > 128 and max_shared_bytes() < LARGE_TILES:
        return f"head dims {h} and {hv} need more than the GPU's shared memory"
    if not b * n * h * hv * s:
        return "an operand is empty"
    if not query.dtype == key.dtype == value.dtype:
        names = [x.dtype.name for x in (query, key, value)]
        return f"query, key and value have the dtypes {', '.join(names)}"
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"`query` is {query.dtype.name}"
    return unsupported_anywhere(query=query, bias=rest.get("bias"))


def unsupported_bwd(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if reason := unsupported(query=query, value=value, **rest):
        return reason
    h, hv = query.shape[3], value.shape[3]
    if max(h, hv) > MAX_GRADIENT_DIM:
        return f"gradients at head dims of {h} and {hv}, above {MAX_GRADIENT_DIM}"
    return None


def segment_bounds(
    row_ids: jax.Array, column_ids: jax.Array, block_rows: int, block_columns: int
) -> jax.Array:
    """[b, blocks of rows, 4]: the blocks of columns that `ranges` is to keep.

    Ids of packed sequences ascend, so that few blocks are kept; others work too.
    """

    def extremes(ids, block):
        short = -ids.shape[1] % block
        blocks = jnp.pad(ids, ((0, 0), (0, short)), mode="edge")
        blocks = blocks.reshape(ids.shape[0], -1, block)
        return blocks.min(-1), blocks.max(-1)

    low, high = (x[:, :, None] for x in extremes(row_ids, block_rows))
    from_low, from_high = (x[:, None] for x in extremes(column_ids, block_columns))
    meet = (low <= from_high) & (from_low <= high)
    return block_ranges(meet, (low == from_high) & (from_low == high))


def block_ranges(meet: jax.Array, same: jax.Array) -> jax.Array:
    """[b, rows, 4] of [b, rows, columns]: [first, last) holds all that meet.

    Of these all of [whole, whole_end) are the same.
    """
    at = jnp.arange(meet.shape[2], dtype=jnp.int32)
    blocks = jnp.int32(meet.shape[2])
    first = jnp.min(jnp.where(meet, at, blocks), -1)
    last = jnp.max(jnp.where(meet, at + 1, 0), -1)
    whole = jnp.min(jnp.where(same, at, blocks), -1)
    behind = ~same & (at >= whole[..., None])
    whole_end = jnp.min(jnp.where(behind, at, blocks), -1)
    return jnp.stack([first, whole, whole_end, last], -1)


def section(rows: int, elements: int, dtype: Any) -> int:
    """How many heads of so many rows the cache holds."""
    return max(1, CACHED_BYTES // (rows * elements * jnp.dtype(dtype).itemsize))


def attention_fwd(
    query,
    key,
    value,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    sinks,
    *,
    scale,
    causal,
    window,
    softcap,
):
    """(out, lse)"""
    b, t, n, h = query.shape
    _, s, heads, hv = value.shape
    given, constants = operands_and_constants(
        query,
        key,
        value,
        bias,
        mask,
        q_segment_ids,
        kv_segment_ids,
        kv_lengths,
        q_offset,
        scale,
        causal,
        window,
        softcap,
    )
    sizes = sizes_of("flash_attention", forward_sizes, given)
    if q_segment_ids is not None:
        given["bounds_ptr"] = segment_bounds(
            given["q_ids_ptr"],
            given["kv_ids_ptr"],
            sizes["BLOCK_Q"],
            sizes["BLOCK_K"],
        )
    results = {
        "out_ptr": jax.ShapeDtypeStruct((b, t, n, hv), query.dtype),
        "lse_ptr": jax.ShapeDtypeStruct((b, t, n), jnp.float32),
    }
    return sparse_call(
        flash_attention_kernel,
        (-(-t // sizes["BLOCK_Q"]) * b * n,),
        given | {"sinks_ptr": sinks, "turned_v_ptr": turned(value)},
        results,
        {
            "C": constants,
            "SECTION": section(s, h + hv, key.dtype) * (n // heads),
            "PIECE": piece(constants, query.dtype),
            **sizes,
        },
    )


@with_bias_gradient
def attention_bwd(
    query,
    key,
    value,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    sinks,
    out,
    lse,
    dout,
    dlse,
    *,
    scale,
    causal,
    window,
    softcap,
    wanted,
):
    """(dq, dk, dv, dS, dsinks)"""
    b, t, n, h = query.shape
    _, s, heads, hv = value.shape
    want_q, want_k, want_v, want_slopes, want_sinks = wanted
    padded = -(-t // PADDING) * PADDING
    lse2, delta = gradient_rows(out, lse, dout, dlse, padded)
    given, constants = operands_and_constants(
        query,
        key,
        value,
        bias,
        mask,
        q_segment_ids,
        kv_segment_ids,
        kv_lengths,
        q_offset,
        scale,
        causal,
        window,
        softcap,
    )
    given |= {"dout_ptr": factor(dout), "lse2_ptr": lse2, "delta_ptr": delta}
    q_ids, kv_ids = given["q_ids_ptr"], given["kv_ids_ptr"]
    dq = dk = dv = slopes = dsinks = None
    if want_k or want_v:
        sizes = sizes_of("flash_attention_bwd_keys", key_sizes, given)
        if q_ids is not None:
            given["bounds_ptr"] = segment_bounds(
                kv_ids, q_ids, sizes["BLOCK_K"], sizes["BLOCK_Q"]
            )
        together = section(t * (n // heads), h + hv, query.dtype)
        dk, dv = sparse_call(
            flash_attention_bwd_keys_kernel,
            (-(-s // sizes["BLOCK_K"]) * b * heads,),
            given | {"turned_q_ptr": turned(query), "turned_dout_ptr": turned(dout)},
            {"dk_ptr": like(key), "dv_ptr": like(value)},
            {"C": constants, "SECTION": together, **sizes},
        )
    if want_q or want_slopes:
        sizes = sizes_of("flash_attention_bwd_queries", query_sizes, given)
        if q_ids is not None:
            given["bounds_ptr"] = segment_bounds(
                q_ids, kv_ids, sizes["BLOCK_Q"], sizes["BLOCK_K"]
            )
        together = section(s, h + hv, key.dtype) * (n // heads)
        if want_slopes:
            slopes = jax.ShapeDtypeStruct((b, n, t, s), bias.dtype)
        dq, slopes = sparse_call(
            flash_attention_bwd_queries_kernel,
            (-(-t // sizes["BLOCK_Q"]) * b * n,),
            given | {"turned_k_ptr": turned(key)},
            {"dq_ptr": like(query), "slopes_ptr": slopes},
            {"C": constants, "SECTION": together, **sizes},
        )
    if want_sinks:
        share = jnp.exp2(
            sinks.astype(jnp.float32)[:, None] * LOG2_E - lse2[..., :t]
        )  # [b n t]; 0 where lse2 is inf
        dsinks = -jnp.sum(share * delta[..., :t], (0, 2)).astype(sinks.dtype)
    return dq, dk, dv, slopes, dsinks
