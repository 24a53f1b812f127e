"""RMSNorm of a residual plus a block's output, and the sum, bf16.

XLA, torch.compile and ours. Torch's backward pass has the gradient of the norm alone,
not that of the sum, which it need not read.
"""

import dataclasses

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled
from benchmarks.norm import rms_norm_add

EPS = rms_norm_add.EPS


def case(name: str, rows: int, d: int) -> Case:
    """Forward x, residual, y and the sum; backward four of them read and dx written."""
    tensor = 2.0 * rows * d
    given = rms_norm_add.case(name, rows, d)
    return dataclasses.replace(given, bytes=(4 * tensor, 5 * tensor))


def by_torch(torch, x, residual, weight):
    total = x + residual
    return torch.nn.functional.rms_norm(total, (x.shape[-1],), weight, EPS), total


BENCHMARK = Benchmark(
    "add_rms_norm",
    lambda x, residual, weight: jaxkern.add_rms_norm(x, residual, weight, eps=EPS),
    [
        case("llama3_8b", 16384, 4096),
        case("qwen3_4b", 16384, 2560),
        case("8192x8192", 8192, 8192),
        case("4096x16384", 4096, 16384),
        case("decode_128", 128, 4096),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch)},
    floats=rms_norm_add.BENCHMARK.floats,  # dresidual is dx: no work
)


def main(arguments):
    return run(BENCHMARK, arguments)
