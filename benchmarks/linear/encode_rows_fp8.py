"""Rows in 8 bits with a scale each, of bfloat16, and of gate and up by swiglu.

    python -m benchmarks encode_rows_fp8

XLA reads rows twice: for the largest element, and for the codes. Of a gated block of
experts it writes what the gate lets through first; "swiglu, then rows" is that, with
the kernel for the rows.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run
from jaxkern.primitives.linear.encode_rows_fp8 import (
    encode_rows_fp8_p,
    swiglu_rows_fp8_p,
)

PLAIN = dict(alpha=1.0, limit=None, up_offset=0.0)


def case(rows: int, d: int, reads: int = 1) -> Case:
    def arrays(key):
        keys = jax.random.split(key, reads)
        return tuple(jax.random.normal(k, (rows, d), jnp.bfloat16) for k in keys)

    moved = (2.0 * reads + 1.0) * rows * d + 4.0 * rows
    return Case(f"{rows}x{d}", arrays, (moved, 0.0))


def in_turn(gate, up):
    return encode_rows_fp8_p(jaxkern.swiglu(gate, up))


def of_gated(gate, up):
    return swiglu_rows_fp8_p(gate, up, **PLAIN)


BENCHMARK = Benchmark(
    "encode_rows_fp8",
    encode_rows_fp8_p,
    [case(32768, 4096), case(8192, 2048), case(65536, 512), case(4096, 2880)],
    differentiable=False,
)
GATED = Benchmark(
    "encode_rows_fp8, swiglu",
    of_gated,
    [case(32768, 768, reads=2), case(32768, 2048, reads=2), case(65536, 512, reads=2)],
    jax_peers={"swiglu, then rows": in_turn},
    differentiable=False,
)
BENCHMARKS = [BENCHMARK, GATED]


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
