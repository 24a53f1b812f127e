"""Attention on a CPU over caches of bytes; the kernel is attention.h."""

from typing import Any

from jaxkern.cpu.attention import attention
from jaxkern.primitives.turboquant.vector_codec import IntCodec


def unsupported(
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
    return attention.unsupported(query, key, value, **rest)


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
    return attention.call(
        query,
        key_codes if key is None else key,
        value_codes if value is None else value,
        kv_lengths,
        q_offset,
        key_scales,
        value_scales,
        **options,
    )
