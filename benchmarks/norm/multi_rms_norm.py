"""One norm for two or three weights, bf16: XLA and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(rows: int, d: int, readers: int) -> Case:
    def arrays(key):
        x, *weights = jax.random.split(key, 1 + readers)
        return (
            jax.random.normal(x, (rows, d), jnp.bfloat16),
            *(jax.random.normal(w, (d,), jnp.bfloat16) for w in weights),
        )

    tensor = 2.0 * rows * d
    bytes = ((1 + readers) * tensor, (2 + readers) * tensor)
    return Case(f"{rows}x{d}_{readers}", arrays, bytes)


BENCHMARK = Benchmark(
    "multi_rms_norm",
    jaxkern.multi_rms_norm,
    [
        case(16384, 2816, 3),
        case(16384, 4096, 2),
        case(8192, 8192, 2),
        case(4096, 16384, 2),
        case(4096, 16384, 3),
    ],
)


def main(arguments):
    return run(BENCHMARK, arguments)
