"""Index scores of DeepSeek V3.2 in a step of decoding: 64 heads of 128 dims, bf16."""

import functools

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(b: int, s: int, t: int = 1, n: int = 64, h: int = 128) -> Case:
    def arrays(key):
        q, k, w = jax.random.split(key, 3)
        return (
            jax.random.normal(q, (b, t, n, h), jnp.bfloat16),
            jax.random.normal(k, (b, s, h), jnp.bfloat16),
            jax.random.normal(w, (b, t, n), jnp.float32),
        )

    size = 2.0 * b * (s * h + t * n * h) + 4.0 * b * t * (s + n)
    flops = 2.0 * b * t * n * s * h
    return Case(f"B{b} T{t} S{s}", arrays, (size, 0.0), (flops, 0.0))


BENCHMARK = Benchmark(
    "indexer_scores",
    functools.partial(jaxkern.indexer_scores, causal=True),
    [
        case(128, 8192),
        case(32, 32768),
        case(1, 131072),
        case(32, 32768, t=2),
        case(1, 4096, t=4096),
    ],
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
