"""A residual plus RMSNorm of a block's output, bf16: XLA, torch.compile and ours."""

import dataclasses

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled
from benchmarks.norm import gated_rms_norm

EPS = gated_rms_norm.EPS


def case(name: str, rows: int, d: int) -> Case:
    tensor = 2.0 * rows * d
    given = gated_rms_norm.case(name, rows, d)
    return dataclasses.replace(given, bytes=(3 * tensor, 3 * tensor))


def by_torch(torch, x, residual, weight):
    normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), None, EPS)
    return (residual.float() + normed * weight.float()).to(x.dtype)


BENCHMARK = Benchmark(
    "rms_norm_add",
    lambda x, residual, weight: jaxkern.rms_norm_add(x, residual, weight, eps=EPS),
    [
        case("gemma2_2b", 16384, 2304),
        case("gemma3_27b", 8192, 5376),
        case("16384x4096", 16384, 4096),
        case("8192x8192", 8192, 8192),
        case("4096x16384", 4096, 16384),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch)},
    floats=(0, 2),  # the gradient of the residual is that of the sum: no work
)


def main(arguments):
    return run(BENCHMARK, arguments)
