"""Running sums of rows: XLA, torch.compile and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled


def case(rows: int, n: int, dtype) -> Case:
    def arrays(key):
        return (jax.random.normal(key, (rows, n), dtype),)

    tensor = jnp.dtype(dtype).itemsize * rows * n
    name = f"{rows}x{n} {jnp.dtype(dtype).name}"
    return Case(name, arrays, (2.0 * tensor, 2.0 * tensor))


BENCHMARK = Benchmark(
    "cumsum",
    jaxkern.cumsum,
    [
        case(1048576, 64, jnp.float32),
        case(32768, 1024, jnp.float32),
        case(32768, 4096, jnp.bfloat16),
        case(2048, 131072, jnp.bfloat16),
        case(32, 4194304, jnp.float32),
    ],
    torch_peers={"torch.compile": torch_compiled(lambda torch, x: torch.cumsum(x, -1))},
)


def main(arguments):
    return run(BENCHMARK, arguments)
