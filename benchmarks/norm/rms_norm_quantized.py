"""RMSNorm of a sum, rounded to 8 bits, bf16 in: XLA and ours."""

import functools

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(rows: int, d: int) -> Case:
    def arrays(key):
        x, residual, weight = jax.random.split(key, 3)
        return (
            jax.random.normal(x, (rows, d), jnp.bfloat16),
            jax.random.normal(residual, (rows, d), jnp.bfloat16),
            jax.random.normal(weight, (d,), jnp.bfloat16),
        )

    # x and the residual are read, the sum and the codes written, and the scales
    bytes = (3 * 2.0 + 1.0) * rows * d + 4.0 * rows * (d // 128)
    return Case(f"{rows}x{d}", arrays, (bytes, 0.0))


BENCHMARK = Benchmark(
    "rms_norm_quantized",
    functools.partial(jaxkern.add_rms_norm_quantized, format="e4m3fn", block=128),
    [case(16384, 4096), case(8192, 8192), case(16384, 7168), case(64, 8192)],
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
