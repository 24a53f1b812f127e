"""Attention on a CPU, decode and prefill, over caches of floats or of bytes.

The kernel is attention.h.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import FLOATS, cpu_call, missing
from jaxkern.primitives.turboquant.vector_codec import IntCodec


def unsupported(query, key, value, **rest: Any) -> str | None:
    for name in ("bias", "mask", "q_segment_ids", "sinks"):
        if rest.get(name) is not None:
            return f"`{name}` is not in the kernel"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in FLOATS and not (name != "query" and x.dtype == jnp.uint8):
            return f"`{name}` is {x.dtype}, not one of {', '.join(FLOATS)}"
        if math.prod(x.shape) == 0:
            return f"`{name}` is empty"
    return missing()


def unsupported_quantized(
    query, key, key_codes, value, value_codes, key_codec, value_codec, **rest: Any
) -> str | None:
    caches = (("key", key_codec, key_codes), ("value", value_codec, value_codes))
    for name, codec, codes in caches:
        if codec is None:
            continue
        if not isinstance(codec, IntCodec) or codec.bits != 8:
            return f"{name}s are of {codec}, the kernel reads codes of 8 bits"
        if codec.group not in (None, codes.shape[-1]):
            return (
                f"{name}s have a scale for every {codec.group} dims, not for a vector"
            )
    key, value = (
        a if a is not None else b for a, b in ((key, key_codes), (value, value_codes))
    )
    if key.shape[-1] != query.shape[-1]:
        return "`key` and `query` differ in their dims"
    return unsupported(query, key, value, **rest)


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
    **options: Any,
):
    del bias, mask, q_segment_ids, kv_segment_ids, sinks  # refused
    return call(query, key, value, kv_lengths, q_offset, None, None, **options)


def quantized_cache_attention(
    query,
    key,
    key_codes,
    key_scales,
    value,
    value_codes,
    value_scales,
    mask,
    kv_lengths,
    q_offset,
    sinks,
    *,
    key_codec,
    value_codec,
    **options: Any,
):
    del mask, sinks, key_codec, value_codec  # refused, and known to be of 8 bits
    return call(
        query,
        key_codes if key is None else key,
        value_codes if value is None else value,
        kv_lengths,
        q_offset,
        key_scales,
        value_scales,
        **options,
    )


def call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kv_lengths: jax.Array | None,
    q_offset: jax.Array | None,
    key_scales: jax.Array | None,  # [b, s, k, 1] where keys are bytes
    value_scales: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> list[jax.Array]:
    (b, t, n, _), s, hv = query.shape, key.shape[1], value.shape[-1]

    def per_sequence(x, default: int):
        if x is None:
            return jnp.full(b, default, jnp.int32)
        limit = np.iinfo(np.int32).max
        far = min(s + t + (window or 0), limit)  # from there on a window shows no key
        far = min(far, int(jnp.iinfo(x.dtype).max))
        return jnp.clip(x, max(jnp.iinfo(x.dtype).min, -limit), far).astype(jnp.int32)

    def of_vectors(scales: jax.Array | None) -> jax.Array:
        if scales is None:
            return jnp.zeros(0, jnp.float32)
        return scales[..., 0].astype(jnp.float32)

    return cpu_call(
        "attention",
        [
            jax.ShapeDtypeStruct((b, t, n, hv), query.dtype),
            jax.ShapeDtypeStruct((b, t, n), jnp.float32),
        ],
        query,
        key,
        value,
        per_sequence(kv_lengths, s),
        per_sequence(q_offset, s - t),
        of_vectors(key_scales),
        of_vectors(value_scales),
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0.0),
        window=np.int64(window or 0),
        causal=causal,
    )
