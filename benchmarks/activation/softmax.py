"""Softmax over rows: XLA, Liger, torch.compile and ours."""

import functools

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled


def case(rows: int, d: int) -> Case:
    def arrays(key):
        return (jax.random.normal(key, (rows, d), jnp.bfloat16),)

    tensor = 2.0 * rows * d
    return Case(f"{rows}x{d}", arrays, (2 * tensor, 3 * tensor))


def liger(case, x):
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


BENCHMARK = Benchmark(
    "softmax",
    jaxkern.softmax,
    [
        case(32768, 1024),
        case(32768, 4096),
        case(8192, 16384),
        case(8192, 32768),
        case(2048, 131072),
        case(16384, 5000),
    ],
    torch_peers={
        "torch.compile": torch_compiled(lambda torch, x: torch.softmax(x, -1)),
        "Liger": liger,
    },
)


CAPPED = Benchmark(
    "softmax_softcap",
    functools.partial(jaxkern.softmax, softcap=50.0),
    [case(32768, 4096), case(8192, 16384), case(2048, 131072)],
)
BENCHMARKS = [BENCHMARK, CAPPED]


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
