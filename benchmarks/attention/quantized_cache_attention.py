"""Decode attention over quantised caches, beside ours over the same tokens in bf16."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run
from jaxkern import Float8Codec, IntCodec, QuantizedVectors, TurboQuantCodec

CODECS = {
    "int8": IntCodec(8),
    "float8": Float8Codec(),
    "int4": IntCodec(4),
    "int4 by 32": IntCodec(4, group=32),
    **{f"turbo{bits}": TurboQuantCodec(bits) for bits in (8, 7, 6, 5, 4, 3)},
}

BFLOAT16 = "jaxkern, bf16 cache"


def case(name: str, b: int, s: int, n: int = 32, k: int = 8, h: int = 128) -> Case:
    codec = CODECS[name]

    def numbers(key):
        return jax.random.normal(key, (b, s, k, h), jnp.bfloat16)

    def cache(x):
        """Quantised a sequence at a time."""
        return jax.lax.map(lambda y: jaxkern.quantize_vectors(y, codec), x)

    def arrays(key):
        q, k_, v = jax.random.split(key, 3)
        query = jax.random.normal(q, (b, 1, n, h), jnp.bfloat16)
        plain = numbers(k_), numbers(v)
        return query, *map(cache, plain), jnp.full((b,), s, jnp.int32), *plain

    like = jax.eval_shape(lambda: QuantizedVectors.zeros((b, s, k, h), codec))
    size = 2.0 * (like.codes.size + 4 * like.scales.size) + 4.0 * b * n * h
    large = b * s > 4096
    return Case(
        f"{name} B{b} S{s} H{n} kv{k} D{h}",
        arrays,
        (size, 0.0),
        reference=not large,
        checked=case(name, 1, 4096, n, k, h) if large else None,
    )


def ours(query, key, value, lengths, plain_key, plain_value):
    del plain_key, plain_value
    return jaxkern.quantized_cache_attention(query, key, value, kv_lengths=lengths)


def in_bfloat16(query, key, value, lengths, plain_key, plain_value):
    """Of the numbers before they were quantised: its error is that of the codes."""
    del key, value
    return jaxkern.attention(query, plain_key, plain_value, kv_lengths=lengths)


BENCHMARK = Benchmark(
    "quantized_cache_attention",
    ours,
    [
        *(case(name, 1, 65536) for name in CODECS),
        *(case(name, 16, 65536) for name in CODECS),
        *(case(name, 32, 4096) for name in ("int8", "turbo4")),
    ],
    jax_peers={BFLOAT16: in_bfloat16},
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
