"""The k largest elements of each row, in order: XLA, torch and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

LONG = [
    (32, 128256, jnp.float32),
    (32, 128256, jnp.bfloat16),
    (1, 131072, jnp.float32),
    (4096, 4096, jnp.float32),
    (8, 262144, jnp.float32),
    (1, 1000000, jnp.float32),
]
SHORT = [
    (16384, 512, jnp.float32),
    (16384, 512, jnp.bfloat16),
    (4096, 256, jnp.float32),
    (8192, 128, jnp.float32),
    (1000, 300, jnp.float32),
]


def benchmark(k: int, shapes: list = LONG) -> Benchmark:
    def case(rows: int, v: int, dtype) -> Case:
        def arrays(key):
            return (jax.random.normal(key, (rows, v), dtype),)

        kind = jnp.dtype(dtype)
        name = f"{rows}x{v} {kind.name}"
        return Case(name, arrays, (rows * (v * kind.itemsize + 8 * k), 0))

    return Benchmark(
        f"top_k_{k}",
        lambda x: jaxkern.top_k(x, k),
        [case(*shape) for shape in shapes],
        torch_peers={"torch": lambda case, x: lambda x: tuple(x.topk(k))},
        differentiable=False,
    )


BENCHMARKS = [
    benchmark(8, LONG + SHORT),
    benchmark(64),
    benchmark(1024),
    benchmark(6, SHORT),
]
BENCHMARK = BENCHMARKS[1]


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
