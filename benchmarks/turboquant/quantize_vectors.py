"""Keys and values into codes and scales: rotation, levels and packing in one launch."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run
from jaxkern import Float8Codec, IntCodec, TurboQuantCodec

CODECS = {
    **{f"turboquant {bits}": TurboQuantCodec(bits) for bits in range(2, 9)},
    "int8": IntCodec(8),
    "int4 group 32": IntCodec(4, group=32),
    "float8": Float8Codec(),
}


def benchmark(name: str) -> Benchmark:
    codec = CODECS[name]

    def case(d: int) -> Case:
        rows = 2**26 // d

        def arrays(key):
            return (jax.random.normal(key, (rows, d), jnp.bfloat16),)

        groups = d // min(codec.group or d, d)
        moved = rows * (d * (2 + codec.bits / 8) + 4 * groups)
        return Case(f"{rows}x{d}", arrays, (moved, 0.0))

    return Benchmark(
        f"quantize_vectors {name}",
        lambda x: jaxkern.quantize_vectors(x, codec),
        [case(64), case(128), case(256)],
        differentiable=False,
    )


BENCHMARKS = [benchmark(name) for name in CODECS]
BENCHMARK = benchmark("turboquant 4")


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
