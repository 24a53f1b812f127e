"""Vectors of keys and values from codes and scales: levels and rotation, one launch."""

import jax

import jaxkern
from benchmarks._gpu import Benchmark, Case, run
from benchmarks.turboquant.quantize_vectors import CODECS
from jaxkern import QuantizedVectors


def benchmark(name: str) -> Benchmark:
    codec = CODECS[name]

    def case(d: int) -> Case:
        rows = 2**26 // d

        def arrays(key):
            return (jaxkern.quantize_vectors(jax.random.normal(key, (rows, d)), codec),)

        like = jax.eval_shape(lambda: QuantizedVectors.zeros((rows, d), codec))
        moved = like.codes.size + 4 * like.scales.size + 2 * rows * d
        return Case(f"{rows}x{d}", arrays, (moved, 0.0))

    return Benchmark(
        f"dequantize_vectors {name}",
        lambda x: jaxkern.dequantize_vectors(x, dtype="bfloat16"),
        [case(64), case(128), case(256)],
        differentiable=False,
    )


BENCHMARKS = [benchmark(name) for name in CODECS]
BENCHMARK = benchmark("turboquant 4")


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
