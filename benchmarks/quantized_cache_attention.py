"""Decode attention over quantised caches; `decode_attention` has the bf16 figures."""

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
    "turbo8": TurboQuantCodec(8),
    "turbo4": TurboQuantCodec(4),
    "turbo3": TurboQuantCodec(3),
}


def case(name: str, b: int, s: int, n: int = 32, k: int = 8, h: int = 128) -> Case:
    codec = CODECS[name]

    def cache(key):
        """Normal numbers, quantised a sequence at a time."""

        def sequence(key):
            return jaxkern.quantize_vectors(jax.random.normal(key, (s, k, h)), codec)

        return jax.lax.map(sequence, jax.random.split(key, b))

    def arrays(key):
        q, k_, v = jax.random.split(key, 3)
        query = jax.random.normal(q, (b, 1, n, h), jnp.bfloat16)
        return query, cache(k_), cache(v), jnp.full((b,), s, jnp.int32)

    like = jax.eval_shape(lambda: QuantizedVectors.zeros((b, s, k, h), codec))
    size = 2.0 * (like.codes.size + 4 * like.scales.size) + 4.0 * b * n * h
    return Case(f"{name} B{b} S{s} H{n} kv{k} D{h}", arrays, (size, 0.0))


def ours(query, key, value, lengths):
    return jaxkern.quantized_cache_attention(query, key, value, kv_lengths=lengths)


BENCHMARK = Benchmark(
    "quantized_cache_attention",
    ours,
    [
        *(case(name, 1, 65536) for name in CODECS),
        *(case(name, 16, 65536) for name in CODECS),
        *(case(name, 32, 4096) for name in ("int8", "turbo4")),
    ],
    sizes={
        "decode_quantized": {
            "BLOCK": (16, 32, 64),
            "PER_SM": (1, 2, 3, 4),
            "SHARES": (1, 2),
            "STAGES": (2, 3, 4),
        },
    },
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
