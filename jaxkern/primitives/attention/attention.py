"""Attention: softmax(scale q k^T + bias) v, over the keys each query may see.

Forward as in https://arxiv.org/abs/1706.03762, backward from the saved log-sum-exp as
in FlashAttention-2 (https://arxiv.org/abs/2307.08691), grouped heads as in
https://arxiv.org/abs/2305.13245.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from jaxkern.primitives.attention.attend import attend, attend_fwd
from jaxkern.primitives.attention.by_rows import by_rows, gradients_by_rows
from jaxkern.primitives.attention.dropout import Dropout, seeds_of
from jaxkern.primitives.attention.mask import checked_visibility
from jaxkern.primitives.attention.operands import (
    AttentionGradients,
    AttentionOperands,
    AttentionOptions,
)
from jaxkern.primitives.attention.plain_attention import (
    SoftcapAfterBias,
    plain_attention_p,
)
from jaxkern.primitives.attention.scale import with_static_scale
from jaxkern.primitives.check_arguments import check_arguments, checked_key
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def attention(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k hv"],
    *,
    bias: Float[Array, "#b #k*g #t #s"] | None = None,
    mask: Bool[Array, "#b #k*g #t #s"] | None = None,
    segment_ids: Int[Array, "b t"]
    | tuple[Int[Array, "b t"], Int[Array, "b s"]]
    | None = None,
    kv_lengths: Int[Array, " b"] | None = None,
    q_offset: int | Int[Array, " b"] | None = None,
    sinks: Float[Array, " k*g"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | SoftcapAfterBias | None = None,
    dropout: Dropout | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "b t k*g hv"]
    | tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]
):
    """Attention of t queries over s keys, each key head shared by g query heads.

        S   = softcap * tanh(scale * q k^T / softcap) + bias   (tanh: only with softcap)
        lse = ln(sum_j exp(S_j) [+ exp(sink)])                 over the visible keys j
        out = sum_j exp(S_j - lse) v_j

    Query head i reads key head i // g ("block" order, as Hugging Face; llama.cpp's
    tiled order i % k needs the heads permuted first). A key is visible where all of
    these hold, for query row i at position p = i + q_offset and key row j:

    | given         | visible where                                                 |
    |---------------|---------------------------------------------------------------|
    | `causal`      | j <= p                                                        |
    | `window=W`    | p - W < j: with causal the last W keys, p itself among them   |
    | `window=(l, r)` | p - l <= j <= p + r; None for no bound on a side            |
    | `mask`        | mask[i, j]                                                    |
    | `segment_ids` | the ids of i and j are equal                                  |
    | `kv_lengths`  | j < kv_lengths: the first rows of a key/value cache           |

    A window of W is W keys as in Hugging Face and llama.cpp;
    `jax.nn.dot_product_attention(local_window_size=W - 1)` is the same window, and its
    pair is ours. Every kernel takes a pair: it is a causal window, r positions on. A
    query that sees no key gives zeros, lse = -inf and zero gradients, never NaN. What
    lies behind `kv_lengths` has no influence, be it NaN; a NaN that only `mask` hides
    has.

    Scores, softmax and sums are float32 (float64 for float64 inputs), one rounding to
    query.dtype. The plain lowering holds at most about 256 MB of scores at once; it
    takes longer inputs by blocks of query rows.

    Decoding over a cache: pass the whole cache with `kv_lengths`, and as `q_offset` the
    position of the first query; `cached_attention` does it for every kind of cache.
    Over a ring (`update_kv_cache(..., ring=True)`) the order of the keys does not
    matter, so a single query over a ring of s slots that has seen `length` tokens,
    itself included, needs only `kv_lengths=min(length, s)`, no causal and no window: it
    sees the last s tokens, a window of s. For more queries at once, or a ring larger
    than the window, build `mask` from `ring_positions`.

    Source: https://arxiv.org/abs/1706.03762, https://arxiv.org/abs/2307.08691,
    https://arxiv.org/abs/2305.13245.

    Args:
      query: `[b, t, n, h]`, any float dtype, n = k*g heads. Without b where all
        operands are without b.
      key: `[b, s, k, h]`, may differ from query in dtype.
      value: `[b, s, k, hv]`.
      bias: broadcastable to `[b, n, t, s]`, added to the scores; differentiable. -inf
        hides a key.
      mask: bool, broadcastable to `[b, n, t, s]`, True where a key may be seen.
      segment_ids: `[b, t]` for queries and keys (t = s), or one array for each.
      kv_lengths: `[b]` int, may be traced.
      q_offset: position of query row 0 among the keys, a number or `[b]`, may be
        traced. Default s - t: the last query sees the last key. Only read with causal
        or window.
      sinks: `[n]`, one more logit per head that takes weight but has no value
        (gpt-oss). It counts in lse: a query without keys then has lse = sink, and still
        gives zeros.
      scale: of the scores, default h ** -0.5. Traced or learned, it is multiplied into
        the queries, which are then rounded once more; differentiable.
      causal: queries see no key after their own position.
      window: see the table, at least 1, or two numbers of at least 0.
      softcap: Gemma 2's cap of the scores, after scale, before bias and mask;
        `SoftcapAfterBias(cap)` caps after the bias.
      dropout: `Dropout(rate, key)` of the weights exp(S - lse); lse does not know of
        it. Of the other forms only `latent_attention` has it: caches in pages or in
        codes serve inference.
      return_lse: return (out, lse); both are differentiable. `merge_partials` makes one
        of results over disjoint keys.

    Float32 is multiplied at the precision of `jax.default_matmul_precision` when this
    is called, in the gradients too. On a GPU that is TF32 unless it is "highest" or
    "float32", by kernels and by XLA alike. At these two, kernels also keep 8 more bits
    of an `out` of 16 for its gradients, a byte for each number. Where one key takes
    nearly all weight, dS is a small difference of what `out` says and loses to its
    rounding; the plain lowering sums P dP instead and needs nothing.

    Returns:
      out: `[b, t, n, hv]`, dtype of query.
      lse: `[b, t, n]`, natural logarithm, float32; only with return_lse.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: an option out of range, or an ambiguous position of the queries.

    Example:
      >>> x = jnp.eye(4)[None, :, None, :2]  # [b, t, heads, h]
      >>> out, lse = jaxkern.attention(x, x, x, causal=True, return_lse=True)
      >>> out[0, :, 0]
      Array([[1.   , 0.   ],
             [0.33 , 0.67 ],
             [0.333, 0.333],
             [0.25 , 0.25 ]], dtype=float32)
      >>> query = jnp.ones((1, 4, 8, 2))  # eight query heads share one key head
      >>> jaxkern.attention(query, x, x, causal=True, window=2).shape
      (1, 4, 8, 2)
    """
    unbatched = query.ndim == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
        segment_ids = jax.tree.map(lambda ids: ids[None], segment_ids)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise TypeError(
                f"attention: `{name}` must have dims [b, rows, heads, head dim], all "
                f"three with b or all without, got shape {x.shape}."
            )
    b, t, n, _ = query.shape
    s = key.shape[1]
    query, scale = with_static_scale("attention", query, scale)
    after_bias = isinstance(softcap, SoftcapAfterBias) and bias is not None
    cap = softcap.cap if isinstance(softcap, SoftcapAfterBias) else softcap
    causal, window, q_offset = checked_visibility(
        "attention", causal, window, cap, q_offset, kv_lengths, t, s
    )
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(
            f"attention: `mask` must be bool, True where a key may be seen, got "
            f"{mask.dtype}. Pass what is to be added to the scores as `bias`."
        )
    paired = isinstance(segment_ids, tuple)
    q_segment_ids, kv_segment_ids = segment_ids if paired else (segment_ids,) * 2
    operands = AttentionOperands(
        query,
        key,
        value,
        broadcastable("bias", bias, (b, n, t, s)),
        broadcastable("mask", mask, (b, n, t, s)),
        q_segment_ids,
        kv_segment_ids,
        per_sequence("attention", "kv_lengths", kv_lengths, (b,)),
        per_sequence("attention", "q_offset", q_offset, (b,)),
        sinks,
    )
    options = AttentionOptions(scale=scale, causal=causal, window=window, softcap=cap)
    if dropout is not None and dropout.rate == 0:
        dropout = None
    if dropout is not None or after_bias:
        seeds, rate = None, 0.0
        if dropout is not None:
            own = checked_key("attention", "dropout.key", dropout.key)
            seeds, rate = seeds_of(own, b, n), float(dropout.rate)
        more = dict(softcap_after_bias=after_bias, dropout=rate)
        out, lse = plain_attention_p(*operands, seeds, **options, **more)
    else:
        out, lse = attention_p(*operands, **options)
    if unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def broadcastable(name, x, shape):
    """x with the four dims [b, n, t, s], each whole or 1."""
    if x is None:
        return None
    full = (1,) * (4 - x.ndim) + x.shape
    if len(full) != 4 or any(m not in (1, n) for m, n in zip(full, shape, strict=True)):
        raise TypeError(
            f"attention: `{name}` must be broadcastable to [b, n, t, s] = "
            f"{list(shape)}, got shape {x.shape}."
        )
    return x.reshape(full)


# References, by blocks of query rows. `attend` and `attend_bwd` are the mathematics.


def attention_reference(
    o: AttentionOperands, **options: Unpack[AttentionOptions]
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]:
    return by_rows(attend, **o._asdict(), **options)


def attention_fwd_reference(
    o: AttentionOperands, **options: Unpack[AttentionOptions]
) -> tuple[
    Float[Array, "b t k*g hv"], Float[Array, "b t k*g"], Int8[Array, "b t k*g tail"]
]:
    """And what rounding took from out, which its gradients need: `tail_of`."""
    return by_rows(attend_fwd, **o._asdict(), **options)


def attention_bwd_reference(
    o: AttentionOperands,
    out: Float[Array, "b t k*g hv"],
    lse: Float[Array, "b t k*g"],
    tail: Int8[Array, "b t k*g tail"] | None,
    dout: Float[Array, "b t k*g hv"],
    dlse: Float[Array, "b t k*g"],
    **options: Unpack[AttentionOptions],
) -> AttentionGradients:
    del out, tail  # kernels need them
    return gradients_by_rows(**o._asdict(), lse=lse, dout=dout, dlse=dlse, **options)


attention_p = kernel_primitive(
    attention_reference,
    fwd=attention_fwd_reference,
    bwd=attention_bwd_reference,
    # each row is a softmax over all of s; the position of a row counts from t and s
    replicated=("t", "s", "h", "hv", "tail"),
)
