"""RMSNorm with a weight, bf16: XLA, Liger, torch.compile and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled

EPS = 1e-6


def case(rows: int, d: int) -> Case:
    def arrays(key):
        x, weight = jax.random.split(key)
        return (
            jax.random.normal(x, (rows, d), jnp.bfloat16),
            jax.random.normal(weight, (d,), jnp.bfloat16),
        )

    tensor = 2.0 * rows * d
    return Case(f"{rows}x{d}", arrays, (2 * tensor, 3 * tensor))


def by_torch(torch, x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def liger(case, x, weight):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)


BENCHMARK = Benchmark(
    "rms_norm",
    lambda x, weight: jaxkern.rms_norm(x, weight, eps=EPS),
    [
        case(16384, 4096),
        case(8192, 8192),
        case(4096, 16384),
        case(131072, 128),
        case(65536, 1024),
        case(1024, 131072),
        case(16384, 5000),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch), "Liger": liger},
    bytes_only=True,
)


def main(arguments):
    return run(BENCHMARK, arguments)
