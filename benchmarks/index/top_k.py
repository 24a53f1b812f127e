"""The k largest elements of each row, in order: XLA, torch and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def benchmark(k: int) -> Benchmark:
    def case(rows: int, v: int, dtype) -> Case:
        def arrays(key):
            return (jax.random.normal(key, (rows, v), dtype),)

        kind = jnp.dtype(dtype)
        name = f"{rows}x{v} {kind.name}"
        return Case(name, arrays, (rows * (v * kind.itemsize + 8 * k), 0))

    return Benchmark(
        f"top_k_{k}",
        lambda x: jaxkern.top_k(x, k),
        [
            case(32, 128256, jnp.float32),
            case(32, 128256, jnp.bfloat16),
            case(1, 131072, jnp.float32),
            case(4096, 4096, jnp.float32),
            case(8, 262144, jnp.float32),
        ],
        torch_peers={"torch": lambda case, x: lambda x: tuple(x.topk(k))},
        differentiable=False,
    )


BENCHMARKS = [benchmark(k) for k in (8, 64, 1024)]
BENCHMARK = BENCHMARKS[1]


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
