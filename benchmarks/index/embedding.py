"""Embedding and its gradient, bf16: XLA, torch, Liger and ours.

The gradient is a whole table: its limit is to write it once and to read dy once.
"""

import jax
import jax.numpy as jnp

from benchmarks._gpu import Benchmark, Case, run
from jaxkern.primitives.index.embedding import embedding


def case(tokens: int, v: int, d: int, frequent: float = 0.0) -> Case:
    """`frequent` is the share of tokens that are all the same."""

    def arrays(key):
        ids, table, same = jax.random.split(key, 3)
        drawn = jax.random.randint(ids, (tokens,), 0, v)
        is_same = jax.random.uniform(same, (tokens,)) < frequent
        return (
            jnp.where(is_same, 0, drawn),
            jax.random.normal(table, (v, d), jnp.bfloat16),
        )

    y = 2.0 * tokens * d
    name = f"{tokens} of {v}x{d}" + (", half the same" if frequent else "")
    return Case(name, arrays, (2 * y, y + 2.0 * v * d))


def by_torch(case, ids, table):
    import torch

    return lambda ids, table: torch.nn.functional.embedding(ids.long(), table)


def liger(case, ids, table):
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return lambda ids, table: LigerEmbeddingFunction.apply(table, ids.long())


BENCHMARK = Benchmark(
    "embedding",
    lambda ids, table: embedding(ids, table, out_of_bounds="clip"),
    [
        case(8192, 128256, 4096),
        case(16384, 151936, 1024),
        case(16384, 151936, 1024, frequent=0.5),
        case(65536, 32000, 4096),
        case(8192, 49152, 576),
        case(2048, 8192, 576),
    ],
    torch_peers={"torch": by_torch, "Liger": liger},
)


def main(arguments):
    return run(BENCHMARK, arguments)
