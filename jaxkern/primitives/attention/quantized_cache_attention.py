"""Attention over quantised keys and values: softmax(scale q k^T) v, k and v decoded.

Rotated keys and values (https://arxiv.org/abs/2504.19874) are never rotated back:
<q, R^T k> = <Rq, k> and sum_j p_j R^T v_j = R^T (sum_j p_j v_j).
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxkern.primitives.attention.attention import (
    attention_bwd_reference,
    attention_reference,
    broadcastable,
)
from jaxkern.primitives.attention.mask import as_causal
from jaxkern.primitives.attention.scale import with_static_scale
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.turboquant.fwht import fwht_reference
from jaxkern.primitives.turboquant.quantized_vectors import QuantizedVectors
from jaxkern.primitives.turboquant.vector_codec import (
    VectorCodec,
    decode,
    decode_levels,
)


@check_arguments
def quantized_cache_attention(
    query: Float[Array, "b t k*g h"],
    key: QuantizedVectors | Float[Array, "b s k h"],
    value: QuantizedVectors | Float[Array, "b s k hv"],
    *,
    mask: Bool[Array, "#b #k*g #t #s"] | None = None,
    kv_lengths: Int[Array, " b"] | None = None,
    q_offset: int | Int[Array, " b"] | None = None,
    sinks: Float[Array, " k*g"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Float[Array, "b t k*g hv"] | tuple[Array, Array]:
    """`attention` that reads its keys and values from quantised caches.

        attention(query, dequantize_vectors(key), dequantize_vectors(value), ...)

    in exact arithmetic. Codes are decoded where they are read: a query row of rotated
    keys is rotated once, a result row of rotated values is rotated back once, the
    cached vectors never. Query and result are float32 between the rotations.

    Keys and values may have different codecs, or none. Keys decide which values are
    read, so they want more bits: float16 keys as they are with 8-bit TurboQuant values
    take 2.65 times less memory than float32, and neither the keys nor the query is
    rotated then.

    Differentiable in query, sinks, float keys or values, and in the scales.

    Args:
      query: `[b, t, n, h]`, any float dtype, n = k*g heads.
      key: cache `[b, s, k, h]`, QuantizedVectors or an array.
      value: cache `[b, s, k, hv]`, likewise.
      mask, kv_lengths, q_offset, sinks, scale, causal, window, softcap, return_lse: see
        `attention`, also for rings.

    Returns:
      out: `[b, t, n, hv]`, dtype of query.
      lse: `[b, t, n]`, only with return_lse.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: an option out of range, or an ambiguous position of the queries.

    Example:
      >>> x = jnp.eye(4)[None, :, None, :2]  # [b, t, heads, h]
      >>> cache = jaxkern.quantize_vectors(x, jaxkern.IntCodec(8))
      >>> jaxkern.quantized_cache_attention(x, cache, cache, causal=True)[0, :, 0]
      Array([[1.   , 0.   ],
             [0.33 , 0.67 ],
             [0.333, 0.333],
             [0.25 , 0.25 ]], dtype=float32)
    """
    op = "quantized_cache_attention"
    key_array, key_codes, key_scales, key_codec = parts(key)
    value_array, value_codes, value_scales, value_codec = parts(value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) != 4:
            raise TypeError(
                f"{op}: `{name}` must have dims [b, rows, heads, head dim], got shape "
                f"{x.shape}."
            )
    query, scale = with_static_scale(op, query, scale)
    b, t, n, _ = query.shape
    s = key.shape[1]
    causal, window, shift = as_causal(op, window, causal)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap is {softcap}. Leave it out for no cap.")
    positioned = causal or window is not None
    if positioned and q_offset is None and kv_lengths is not None and t != s:
        raise ValueError(
            f"{op}: with kv_lengths and t != s the position of the queries is "
            "ambiguous. Pass q_offset: kv_lengths - t if they are the last tokens."
        )
    if shift:
        q_offset = (s - t if q_offset is None else q_offset) + shift
    out, lse = quantized_cache_attention_p(
        query,
        key_array,
        key_codes,
        key_scales,
        value_array,
        value_codes,
        value_scales,
        broadcastable("mask", mask, (b, n, t, s)),
        per_sequence("quantized_cache_attention", "kv_lengths", kv_lengths, (b,)),
        per_sequence(
            "quantized_cache_attention",
            "q_offset",
            q_offset if positioned else None,
            (b,),
        ),
        sinks,
        key_codec=key_codec,
        value_codec=value_codec,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return (out, lse) if return_lse else out


def parts(cache):
    """(array, codes, scales, codec) of a cache, None for what it has not."""
    if isinstance(cache, QuantizedVectors):
        return None, cache.codes, cache.scales, cache.codec
    return cache, None, None, None


def quantized_cache_attention_reference(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b s k h"] | None,
    key_codes: UInt8[Array, "b s k key_bytes"] | None,
    key_scales: Float[Array, "b s k key_groups"] | None,
    value: Float[Array, "b s k hv"] | None,
    value_codes: UInt8[Array, "b s k value_bytes"] | None,
    value_scales: Float[Array, "b s k value_groups"] | None,
    mask: Bool[Array, "#b #k*g #t #s"] | None,
    kv_lengths: Int[Array, " b"] | None,
    q_offset: Int[Array, " b"] | None,
    sinks: Float[Array, " k*g"] | None,
    *,
    key_codec: VectorCodec | None,
    value_codec: VectorCodec | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]:
    k = decoded(key, key_codes, key_scales, key_codec)
    v = decoded(value, value_codes, value_scales, value_codec)
    if k.shape[-1] != query.shape[-1]:
        raise TypeError(
            f"quantized_cache_attention: dim `h` is {query.shape[-1]} in `query` but "
            f"{k.shape[-1]} in `key`."
        )
    out, lse = attention_reference(
        rotated_query(query, v.shape[-1], key_codec, value_codec),
        k,
        v,
        bias=None,
        mask=mask,
        q_segment_ids=None,
        kv_segment_ids=None,
        kv_lengths=kv_lengths,
        q_offset=q_offset,
        sinks=sinks,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return rotated(out, value_codec, back=True).astype(query.dtype), lse


def quantized_cache_attention_bwd_reference(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b s k h"] | None,
    key_codes: UInt8[Array, "b s k key_bytes"] | None,
    key_scales: Float[Array, "b s k key_groups"] | None,
    value: Float[Array, "b s k hv"] | None,
    value_codes: UInt8[Array, "b s k value_bytes"] | None,
    value_scales: Float[Array, "b s k value_groups"] | None,
    mask: Bool[Array, "#b #k*g #t #s"] | None,
    kv_lengths: Int[Array, " b"] | None,
    q_offset: Int[Array, " b"] | None,
    sinks: Float[Array, " k*g"] | None,
    out: Float[Array, "b t k*g hv"],
    lse: Float[Array, "b t k*g"],
    dout: Float[Array, "b t k*g hv"],
    dlse: Float[Array, "b t k*g"],
    *,
    key_codec: VectorCodec | None,
    value_codec: VectorCodec | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "b s k h"] | None,
    Float[Array, "b s k key_groups"] | None,
    Float[Array, "b s k hv"] | None,
    Float[Array, "b s k value_groups"] | None,
    Float[Array, " k*g"] | None,
]:
    dquery, dk, dv, _, dsinks = attention_bwd_reference(
        rotated_query(query, out.shape[-1], key_codec, value_codec),
        decoded(key, key_codes, key_scales, key_codec),
        decoded(value, value_codes, value_scales, value_codec),
        bias=None,
        mask=mask,
        q_segment_ids=None,
        kv_segment_ids=None,
        kv_lengths=kv_lengths,
        q_offset=q_offset,
        sinks=sinks,
        out=rotated(out, value_codec),
        lse=lse,
        tail=None,
        dout=rotated(dout, value_codec),
        dlse=dlse,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    dquery = rotated(dquery, key_codec, back=True).astype(query.dtype)
    dkey, dkey_scales = pulled_back(dk, key_codes, key_scales, key_codec)
    dvalue, dvalue_scales = pulled_back(dv, value_codes, value_scales, value_codec)
    return dquery, dkey, dkey_scales, dvalue, dvalue_scales, dsinks


def rotated_query(query: Array, hv: int, key_codec: Any, value_codec: Any) -> Array:
    """As the keys are; in at least float32 if a rotation precedes or follows."""
    if value_codec is not None and value_codec.signs(hv) is not None:
        query = at_least_f32(query)
    return rotated(query, key_codec)


def rotated(x: Array, codec: VectorCodec | None, back: bool = False) -> Array:
    """Rx or R^T x, R of the codec; x where there is none."""
    signs = None if codec is None else codec.signs(x.shape[-1])
    if signs is None:
        return x
    signs = jnp.asarray(signs)
    before, after = (None, signs) if back else (signs, None)
    return fwht_reference(at_least_f32(x), before, after, scale="orthonormal")


def decoded(x: Array | None, codes: Any, scales: Any, codec: Any) -> Array:
    """The cache as an array, rotated as it is stored."""
    if x is not None:
        return x
    return decode("quantized_cache_attention", codes, scales, codec)


def pulled_back(dx, codes, scales, codec):
    """Gradients of a float cache and of the scales, from that of the decoded cache."""
    if codec is None:
        return dx, None
    groups = scales.shape[-1]
    levels = decode_levels("quantized_cache_attention", codes, groups, codec, dx.dtype)
    dscales = jnp.sum(dx.reshape(levels.shape) * levels, axis=-1)
    return None, dscales.astype(scales.dtype)


quantized_cache_attention_p = kernel_primitive(
    quantized_cache_attention_reference,
    bwd=quantized_cache_attention_bwd_reference,
    # as in attention; and a vector's codes and scales belong together
    replicated=(
        "t",
        "s",
        "h",
        "hv",
        "key_bytes",
        "key_groups",
        "value_bytes",
        "value_groups",
    ),
)
