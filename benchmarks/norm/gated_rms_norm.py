"""RMSNorm with a SiLU gate, bf16: XLA, torch.compile and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled

EPS = 1e-6


def case(name: str, rows: int, d: int) -> Case:
    def arrays(key):
        keys = jax.random.split(key, 3)
        shapes = (rows, d), (rows, d), (d,)
        return tuple(
            jax.random.normal(k, s, jnp.bfloat16)
            for k, s in zip(keys, shapes, strict=True)
        )

    tensor = 2.0 * rows * d
    return Case(name, arrays, (3 * tensor, 5 * tensor))


def by_torch(torch, x, gate, weight):
    normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), None, EPS)
    y = normed * weight.float() * torch.nn.functional.silu(gate.float())
    return y.to(x.dtype)


BENCHMARK = Benchmark(
    "gated_rms_norm",
    lambda x, gate, weight: jaxkern.gated_rms_norm(x, gate, weight, eps=EPS),
    [
        case("qwen3_next_8192", 8192 * 32, 128),
        case("mamba2_2p7b", 16384, 5120),
        case("16384x4096", 16384, 4096),
        case("8192x8192", 8192, 8192),
        case("4096x16384", 4096, 16384),
        case("512x131072", 512, 131072),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch)},
)


def main(arguments):
    return run(BENCHMARK, arguments)
