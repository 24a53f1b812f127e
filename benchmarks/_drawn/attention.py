"""Draws of attention over many queries, and over a cache."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._drawn.draw import (
    EPSILON,
    Draw,
    Source,
    drawn_lengths,
    in_words,
    normals,
    with_options,
)

HEAD_DIMS = (40, 64, 64, 72, 80, 96, 128, 128, 128, 160, 192, 256)
LENGTHS = (128, 197, 700, 1024, 4096)
SCORES = 8  # elements of the scores over those of an operand, at most


def slack(dtype: str) -> float:
    """Roundings: a GPU multiplies float32 as TF32, two factors off by 2^-11 each."""
    tf32 = dtype == "float32" and jax.default_backend() == "gpu"
    return 2.0**-10 / EPSILON["float32"] if tf32 else 2.0


def heads(source: Source) -> tuple[int, int, int]:
    """Query heads, key heads, head dim."""
    k = source.one_of((1, 2, 3, 4, 5, 8, 12, 16))
    group = source.one_of((1, 1, 2, 3, 4, 7, 8))
    return k * group, k, source.one_of(HEAD_DIMS)


def cudnn(sizes: tuple[int, int] | None, causal: bool, q, k, v):
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=sizes, implementation="cudnn"
    )


def cudnn_with_lengths(q, k, v, lengths):
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        query_seq_lengths=jnp.full_like(lengths, q.shape[1]),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def attention(source: Source) -> Draw:
    b, (n, k, h) = source.one_of((1, 1, 2, 3, 4)), heads(source)
    most = source.elements // (b * n)
    t = source.size(16, min(most // h, (SCORES * most) ** 0.5), LENGTHS)
    s = t if source.chance(0.7) else source.size(16, min(8 * t, SCORES * most / t))
    causal = s >= t and source.chance(0.7)
    window = source.size(16, s) if causal and source.chance(0.3) else None
    softcap = 50.0 if source.chance(0.1) else None
    dtype = source.one_of(("bfloat16", "bfloat16", "float16", "float32"))
    peers: dict[str, Callable] = {}
    if dtype != "float32" and softcap is None and not (causal and s != t):
        sizes = None if window is None else (window - 1, 0)
        peers["cuDNN"] = functools.partial(cudnn, sizes, causal)
    options: dict[str, Any] = dict(causal=causal, window=window, softcap=softcap)
    title = f"b{b} t{t} s{s} heads {n}/{k} of {h} {dtype}"
    return Draw(
        f"{title}{in_words(**options)}",
        normals(dtype, (b, t, n, h), (b, s, k, h), (b, s, k, h)),
        with_options(jaxkern.attention, **options),
        floats=(0, 1, 2),
        peers=peers,
        slack=slack(dtype),
    )


def decode_attention(source: Source) -> Draw:
    """A few tokens of each sequence; keys behind its length are not read."""
    n, k, h = heads(source)
    s = source.size(16, min(2**17, source.elements // (k * h)), LENGTHS)
    b = source.size(1, min(256, max(1, source.elements // (s * k * h))))
    t = source.one_of((1, 1, 1, 2, 5, 8))
    dtype = source.one_of(("bfloat16", "bfloat16", "float16"))
    window = source.size(16, s) if source.chance(0.25) else None
    by_length = source.chance(0.6)

    def arrays(key):
        operands = normals(dtype, (b, t, n, h), (b, s, k, h), (b, s, k, h))(key)
        return (*operands, drawn_lengths(key, b, s)) if by_length else operands

    def f(query, key, value, lengths=None):
        offset = None if window is None else (s if lengths is None else lengths) - t
        options = with_options(dict, kv_lengths=lengths, q_offset=offset)()
        causal = window is not None
        return jaxkern.attention(
            query, key, value, causal=causal, window=window, **options
        )

    peer = cudnn_with_lengths if by_length else functools.partial(cudnn, None, False)
    said = in_words(lengths=by_length, window=window)
    return Draw(
        f"b{b} t{t} s{s} heads {n}/{k} of {h} {dtype}{said}",
        arrays,
        f,
        peers={"cuDNN": peer} if window is None else {},
    )


GENERATORS = {"attention": attention, "decode_attention": decode_attention}
