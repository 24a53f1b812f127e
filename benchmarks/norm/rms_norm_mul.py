"""RMSNorm times a tensor of the same shape, bf16: XLA, torch.compile and ours."""

import jaxkern
from benchmarks._gpu import Benchmark, run, torch_compiled
from benchmarks.norm.gated_rms_norm import EPS, case


def by_torch(torch, x, scale, weight):
    normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), None, EPS)
    return (normed * weight.float() * scale.float()).to(x.dtype)


BENCHMARK = Benchmark(
    "rms_norm_mul",
    lambda x, scale, weight: jaxkern.rms_norm_mul(x, scale, weight, eps=EPS),
    [
        case("gemma2_2b", 16384, 2304),
        case("16384x4096", 16384, 4096),
        case("8192x8192", 8192, 8192),
        case("4096x16384", 4096, 16384),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch)},
)


def main(arguments):
    return run(BENCHMARK, arguments)
