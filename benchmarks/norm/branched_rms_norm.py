"""RMSNorm where a residual branch begins, bf16: XLA, torch.compile and ours.

As `rms_norm` forward; backward the gradient of what passes the branch is added.
"""

import dataclasses

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled
from benchmarks.norm import rms_norm

EPS = rms_norm.EPS


def case(rows: int, d: int) -> Case:
    """Backward x, two cotangents and dx; forward x is written out for its reader."""
    tensor = 2.0 * rows * d
    return dataclasses.replace(rms_norm.case(rows, d), bytes=(3 * tensor, 4 * tensor))


def by_torch(torch, x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS), x


BENCHMARK = Benchmark(
    "branched_rms_norm",
    lambda x, weight: jaxkern.branched_rms_norm(x, weight, eps=EPS),
    [
        case(16384, 2048),
        case(16384, 4096),
        case(8192, 8192),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch)},
)


def main(arguments):
    return run(BENCHMARK, arguments)
