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

from jaxkern.primitives.attention.attend import no_tail, saves_tail
from jaxkern.triton.attention.bias_gradient import with_bias_gradient
from jaxkern.triton.attention.forward_kernel import flash_attention_kernel
from jaxkern.triton.attention.gradient_rows import gradient_rows
from jaxkern.triton.attention.keys_kernel import flash_attention_bwd_keys_kernel
from jaxkern.triton.attention.problem import (
    LOG2_E,
    PADDING,
    factor,
    one_product,
    operands_and_constants,
    turned,
)
from jaxkern.triton.attention.queries_kernel import flash_attention_bwd_queries_kernel
from jaxkern.triton.attention.tile_sizes import (
    FORWARD,
    KEYS,
    QUERIES,
    VALUES,
    piece,
    separate,
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
# of all pairs, how many may be seen in float32 up to a head dim: XLA computes all of
# them, and what is hidden costs these kernels nothing
MAX_SHARE = {  # multiplied as TF32; by three such products
    "forward": ({256: 1.0}, {128: 1.0, 256: 0.9}),
    "backward": ({128: 1.0, 256: 0.45}, {64: 1.0, 128: 0.7, 256: 0.3}),
}
EDGE = 64  # queries and keys of a block
SHORT = 128  # queries whose tiles are too few for gradients of wider heads than 64
LARGE_TILES = 160 * 1024  # bytes of the tiles of wider heads than 128
FEW_SCORES = 2**17  # the latency of the tiles is longer than XLA's launches
FEW_QUERIES = 8  # up to here one reads the keys, and the arithmetic does not matter
CACHED_BYTES = 2**25  # of the L2 cache, for the keys and values of one section


def slower(query: Any, key: Any, value: Any, **rest: Any) -> str | None:
    b, t, n, h = query.shape
    scores = b * t * n * key.shape[1]
    if scores <= FEW_SCORES:
        return f"{scores} scores are few"
    if query.dtype != jnp.float32:
        return None
    hv = value.shape[3]
    which = "backward" if "dout" in rest else "forward"
    if which == "backward" and t <= SHORT and max(h, hv) > 64:
        return f"gradients of {t} queries in float32 at head dims of {h} and {hv}"
    by_width = MAX_SHARE[which][0 if one_product(query.dtype) else 1]
    largest = next((x for up_to, x in by_width.items() if max(h, hv) <= up_to), 0.0)
    share = share_seen(t, key.shape[1], **rest)
    if share <= largest:
        return None
    return f"float32 at head dims of {h} and {hv} with {share:.0%} of the pairs seen"


def share_seen(
    t: int, s: int, causal: bool, window: int | None, q_segment_ids: Any, **_: Any
) -> float:
    """Of all pairs those in blocks with one in sight, as far as shapes say."""
    share = min(max(1 - (t - EDGE) / (2 * s), 0.5), 1.0) if causal else 1.0
    if window is not None:
        share = min(share, (window + EDGE) / s + (0.0 if causal else 0.5))
    return share if q_segment_ids is None else share / 2  # there are several


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
    with_tail=False,
):
    """(out, lse), and the tail of out if asked for"""
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
    sizes = sizes_of(FORWARD, given)
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
        "tail_ptr": None,
    }
    tails = with_tail and saves_tail(query.dtype)
    if tails:
        results["tail_ptr"] = jax.ShapeDtypeStruct((b, t, n, hv), jnp.int8)
    out, lse, tail = sparse_call(
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
    if not with_tail:
        return out, lse
    return out, lse, tail if tails else no_tail(out)


def attention_saving(*operands, **options):
    """(out, lse, tail)"""
    return attention_fwd(*operands, **options, with_tail=True)


def key_gradients(given, constants, query, dout, key, value):
    """(dk, dv), of those of key and value that are not None."""
    if key is None and value is None:
        return None, None
    c = constants
    if key is not None and value is not None and separate(c, query.dtype):
        [dk, _] = key_gradients(given, c, query, dout, key, None)
        [_, dv] = key_gradients(given, c, query, dout, None, value)
        return dk, dv
    sizes = sizes_of(VALUES if key is None else KEYS, given)
    bounds = None
    if given["q_ids_ptr"] is not None:
        bounds = segment_bounds(
            given["kv_ids_ptr"], given["q_ids_ptr"], sizes["BLOCK_K"], sizes["BLOCK_Q"]
        )
    together = section(c.T * c.GROUP, c.H + c.HV, query.dtype)
    return sparse_call(
        flash_attention_bwd_keys_kernel,
        (-(-c.S // sizes["BLOCK_K"]) * c.B * c.HEADS,),
        given
        | {
            "bounds_ptr": bounds,
            "turned_q_ptr": None if key is None else turned(query),
            "turned_dout_ptr": None if value is None else turned(dout),
        },
        {"dk_ptr": like(key), "dv_ptr": like(value)},
        {"C": c, "SECTION": together, **sizes},
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
    tail,
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
    lse2, delta = gradient_rows(out, lse, dout, dlse, padded, tail)
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
    dq = slopes = dsinks = None
    dk, dv = key_gradients(
        given,
        constants,
        query,
        dout,
        key if want_k else None,
        value if want_v else None,
    )
    if want_q or want_slopes:
        sizes = sizes_of(QUERIES, given)
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
