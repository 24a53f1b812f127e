"""Attention on a CPU, decode and prefill; the kernel is attention.h."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import FLOATS, cpu_call, missing
from jaxkern.primitives.attention.attend import saves_no_tail
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.attention.operands import AttentionOperands

FEW = 8  # queries of a key head, whose scores the kernel sums by rows of keys


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


def attention(*operands: Any, **options: Any) -> list[jax.Array]:
    o = AttentionOperands(*operands)  # of which the others are refused
    taken = o.query, o.key, o.value, o.kv_lengths, o.q_offset
    return call(*taken, None, None, **options)


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
    """The kernel, of which the caches of 8 bits are another caller."""
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


@saves_no_tail
def attention_fwd(*operands, **options):
    """(out, lse) for gradients, which are XLA's: exp(score - lse) is of its scores.

    For a few queries the kernel sums scores in another order. Where they are large that
    is most of the error of a gradient, so lse is then XLA's too.
    """
    query, key, *_ = operands
    out, lse = attention(*operands, **options)
    if query.shape[1] * query.shape[2] // key.shape[2] <= FEW:
        lse = attention_p.reference(*operands, **options)[1]
    return out, lse
