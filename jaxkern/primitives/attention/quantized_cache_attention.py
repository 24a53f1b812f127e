"""Attention over quantised keys and values: softmax(scale q k^T) v, k and v decoded.

Rotated keys and values (https://arxiv.org/abs/2504.19874) are never rotated back:
<q, R^T k> = <Rq, k> and sum_j p_j R^T v_j = R^T (sum_j p_j v_j).
"""

from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxkern.primitives.attention.attention import (
    attention_bwd_reference,
    attention_reference,
    broadcastable,
)
from jaxkern.primitives.attention.mask import checked_visibility
from jaxkern.primitives.attention.operands import AttentionOperands, AttentionOptions
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
) -> (
    Float[Array, "b t k*g hv"]
    | tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]
):
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

    Source: https://arxiv.org/abs/2504.19874.

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
    causal, window, q_offset = checked_visibility(
        op, causal, window, softcap, q_offset, kv_lengths, t, s
    )
    out, lse = quantized_cache_attention_p(
        query,
        key_array,
        key_codes,
        key_scales,
        value_array,
        value_codes,
        value_scales,
        broadcastable("mask", mask, (b, n, t, s)),
        per_sequence(op, "kv_lengths", kv_lengths, (b,)),
        per_sequence(op, "q_offset", q_offset, (b,)),
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


class CacheOperands(NamedTuple):
    query: Float[Array, "b t k*g h"]
    key: Float[Array, "b s k h"] | None
    key_codes: UInt8[Array, "b s k key_bytes"] | None
    key_scales: Float[Array, "b s k key_groups"] | None
    value: Float[Array, "b s k hv"] | None
    value_codes: UInt8[Array, "b s k value_bytes"] | None
    value_scales: Float[Array, "b s k value_groups"] | None
    mask: Bool[Array, "#b #k*g #t #s"] | None
    kv_lengths: Int[Array, " b"] | None
    q_offset: Int[Array, " b"] | None
    sinks: Float[Array, " k*g"] | None

    def decoded(
        self, key_codec: VectorCodec | None, value_codec: VectorCodec | None
    ) -> AttentionOperands:
        """Query, keys and values as they are stored: rotated, where the codecs do."""
        k = decoded(self.key, self.key_codes, self.key_scales, key_codec)
        v = decoded(self.value, self.value_codes, self.value_scales, value_codec)
        if k.shape[-1] != self.query.shape[-1]:
            raise TypeError(
                f"quantized_cache_attention: dim `h` is {self.query.shape[-1]} in "
                f"`query` but {k.shape[-1]} in `key`."
            )
        return AttentionOperands(
            rotated_query(self.query, v.shape[-1], key_codec, value_codec),
            k,
            v,
            mask=self.mask,
            kv_lengths=self.kv_lengths,
            q_offset=self.q_offset,
            sinks=self.sinks,
        )


def quantized_cache_attention_reference(
    o: CacheOperands,
    *,
    key_codec: VectorCodec | None,
    value_codec: VectorCodec | None,
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]:
    out, lse = attention_reference(o.decoded(key_codec, value_codec), **options)
    return rotated(out, value_codec, back=True).astype(o.query.dtype), lse


def quantized_cache_attention_bwd_reference(
    o: CacheOperands,
    out: Float[Array, "b t k*g hv"],
    lse: Float[Array, "b t k*g"],
    dout: Float[Array, "b t k*g hv"],
    dlse: Float[Array, "b t k*g"],
    *,
    key_codec: VectorCodec | None,
    value_codec: VectorCodec | None,
    **options: Unpack[AttentionOptions],
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "b s k h"] | None,
    Float[Array, "b s k key_groups"] | None,
    Float[Array, "b s k hv"] | None,
    Float[Array, "b s k value_groups"] | None,
    Float[Array, " k*g"] | None,
]:
    operands = o.decoded(key_codec, value_codec)
    out, dout = (rotated(x, value_codec) for x in (out, dout))
    d = attention_bwd_reference(operands, out, lse, None, dout, dlse, **options)
    dquery = rotated(d.query, key_codec, back=True).astype(o.query.dtype)
    dkey, dkey_scales = pulled_back(d.key, o.key_codes, o.key_scales, key_codec)
    dvalue, dvalue_scales = pulled_back(
        d.value, o.value_codes, o.value_scales, value_codec
    )
    return dquery, dkey, dkey_scales, dvalue, dvalue_scales, d.sinks


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
