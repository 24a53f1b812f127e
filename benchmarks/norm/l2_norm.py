"""Vectors scaled to length 1, bf16: XLA, torch.compile and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled

EPS = 1e-6


def case(rows: int, d: int) -> Case:
    def arrays(key):
        return (jax.random.normal(key, (rows, d), jnp.bfloat16),)

    tensor = 2.0 * rows * d
    return Case(f"{rows}x{d}", arrays, (2 * tensor, 3 * tensor))


def by_torch(torch, x):
    x32 = x.float()
    return (x32 * torch.rsqrt((x32 * x32).sum(-1, keepdim=True) + EPS)).to(x.dtype)


BENCHMARK = Benchmark(
    "l2_norm",
    lambda x: jaxkern.l2_norm(x, eps=EPS),
    [case(524288, 128), case(262144, 256), case(16384, 4096)],
    torch_peers={"torch.compile": torch_compiled(by_torch)},
)


def main(arguments):
    return run(BENCHMARK, arguments)
