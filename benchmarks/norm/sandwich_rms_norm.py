"""The norms after and before a block with the sum between, bf16: XLA and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(name: str, rows: int, d: int, readers: int) -> Case:
    def arrays(key):
        x, residual, *weights = jax.random.split(key, 3 + readers)
        return (
            jax.random.normal(x, (rows, d), jnp.bfloat16),
            jax.random.normal(residual, (rows, d), jnp.bfloat16),
            *(jax.random.normal(w, (d,), jnp.bfloat16) for w in weights),
        )

    tensor = 2.0 * rows * d
    # backward: x, residual, dtotal, a dy for each reader; dx, dresidual
    bytes = ((3 + readers) * tensor, (5 + readers) * tensor)
    return Case(name, arrays, bytes)


BENCHMARK = Benchmark(
    "sandwich_rms_norm",
    jaxkern.sandwich_rms_norm,
    [
        case("gemma3_4b", 16384, 2560, 1),
        case("gemma3_27b", 8192, 5376, 1),
        case("gemma4_26b", 16384, 2816, 3),
        case("16384x4096", 16384, 4096, 1),
        case("4096x16384", 4096, 16384, 1),
        case("2048x16384_3", 2048, 16384, 3),
    ],
)


def main(arguments):
    return run(BENCHMARK, arguments)
