"""Index of the largest element of each row: XLA, torch and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled


def case(rows: int, v: int, dtype) -> Case:
    def arrays(key):
        return (jax.random.normal(key, (rows, v), dtype),)

    name = jnp.dtype(dtype).name
    return Case(f"{rows}x{v} {name}", arrays, (rows * v * jnp.dtype(dtype).itemsize, 0))


BENCHMARK = Benchmark(
    "argmax",
    jaxkern.argmax,
    [
        case(32, 128256, jnp.float32),
        case(32, 128256, jnp.bfloat16),
        case(1, 128256, jnp.float32),
        case(4096, 32000, jnp.bfloat16),
        case(65536, 256, jnp.float32),
        case(128, 50257, jnp.float32),
    ],
    torch_peers={
        "torch.compile": torch_compiled(lambda torch, x: x.argmax(-1).int()),
    },
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
