"""Decode attention over a latent cache, DeepSeek's 512 + 64 dims, bf16."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

VALUE_DIM, ROTATED_DIM = 512, 64


def case(b: int, s: int, n: int) -> Case:
    h = VALUE_DIM + ROTATED_DIM

    def arrays(key):
        q, x = jax.random.split(key)
        return (
            jax.random.normal(q, (b, 1, n, h), jnp.bfloat16),
            jax.random.normal(x, (b, s, h), jnp.bfloat16),
            jnp.full((b,), s, jnp.int32),
        )

    size = 2.0 * (b * s * h + b * n * (h + VALUE_DIM))
    flops = 2.0 * b * n * s * (h + VALUE_DIM)
    return Case(f"B{b} S{s} H{n}", arrays, (size, 0.0), (flops, 0.0))


def ours(query, latent, lengths):
    return jaxkern.latent_attention(
        query, latent, value_dim=VALUE_DIM, scale=192**-0.5, kv_lengths=lengths
    )


BENCHMARK = Benchmark(
    "latent_attention",
    ours,
    [
        case(128, 4096, 128),
        case(32, 4096, 128),
        case(128, 4096, 16),
        case(1, 65536, 128),
        case(1, 65536, 16),
    ],
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
