"""Norm and rotation of queries and keys, bf16: XLA and ours.

The limit counts queries and keys read and written, and the tables read, once.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(name: str, tokens: int, n: int, k: int, h: int, pairs: int) -> Case:
    def arrays(key):
        keys = jax.random.split(key, 4)
        shapes = (1, tokens, n, h), (1, tokens, k, h), (h,), (h,)
        heads = (
            jax.random.normal(k, s, jnp.bfloat16)
            for k, s in zip(keys, shapes, strict=True)
        )
        return *heads, *jaxkern.rope_cos_sin(jnp.arange(tokens), 2 * pairs)

    tensor, table = 2.0 * tokens * (n + k) * h, 8.0 * tokens * pairs
    return Case(name, arrays, (2 * tensor + table, 3 * tensor + table))


BENCHMARK = Benchmark(
    "qk_norm_rope",
    jaxkern.qk_norm_rope,
    [
        case("qwen3_8b_8192", 8192, 32, 8, 128, 64),
        case("qwen3_8b_65536", 65536, 32, 8, 128, 64),
        case("qwen3_8b_decode_64", 64, 32, 8, 128, 64),
        case("qwen3_next_16384", 16384, 16, 2, 256, 32),
    ],
    floats=(0, 1, 2, 3),
)


def main(arguments):
    return run(BENCHMARK, arguments)
