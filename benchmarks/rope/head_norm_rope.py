"""Norm and rotation of the heads of one tensor, bf16: XLA and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(name: str, tokens: int, n: int, h: int, pairs: int) -> Case:
    def arrays(key):
        x, weight = jax.random.split(key)
        return (
            jax.random.normal(x, (1, tokens, n, h), jnp.bfloat16),
            jax.random.normal(weight, (h,), jnp.bfloat16),
            *jaxkern.rope_cos_sin(jnp.arange(tokens), 2 * pairs),
        )

    tensor, table = 2.0 * tokens * n * h, 8.0 * tokens * pairs
    return Case(name, arrays, (2 * tensor + table, 3 * tensor + table))


BENCHMARK = Benchmark(
    "head_norm_rope",
    jaxkern.head_norm_rope,
    [
        case("qwen3_8b_16384", 16384, 32, 128, 64),
        case("qwen3_next_16384", 16384, 16, 256, 32),
    ],
    floats=(0, 1),
)


def main(arguments):
    return run(BENCHMARK, arguments)
