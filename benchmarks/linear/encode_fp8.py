"""Codes of 8 bits and their transpose in one pass: Triton's kernel and XLA.

python -m benchmarks encode_fp8
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks._gpu import Benchmark, Case, run
from jaxkern.primitives.linear.encode_fp8 import encode_fp8_p


def case(name: str, rows: int, d: int) -> Case:
    def arrays(key):
        x = jax.random.normal(key, (1, rows, d), jnp.bfloat16)
        return x, jnp.full((), 2.0**-6)

    return Case(name, arrays, (4.0 * rows * d, 0.0))


BENCHMARK = Benchmark(
    "encode_fp8",
    functools.partial(encode_fp8_p, form="e4m3fn"),
    [case("16384x2048", 16384, 2048), case("16384x5632", 16384, 5632)],
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
