"""Dynamic tanh with weight and bias, bf16: XLA, torch.compile and our Triton kernel."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled, under_backend


def case(name: str, rows: int, d: int) -> Case:
    def arrays(key):
        keys = jax.random.split(key, 4)
        shapes = (rows, d), (), (d,), (d,)
        return tuple(
            jax.random.normal(k, s, jnp.bfloat16)
            for k, s in zip(keys, shapes, strict=True)
        )

    tensor = 2.0 * rows * d
    return Case(name, arrays, (2 * tensor, 3 * tensor))


def by_torch(torch, x, alpha, weight, bias):
    return torch.tanh(alpha * x) * weight + bias


BENCHMARK = Benchmark(
    "dynamic_tanh",
    under_backend("triton", jaxkern.dynamic_tanh),  # which "auto" leaves to XLA
    [
        case("vit_l_16", 64 * 197, 1024),
        case("llama_7b", 16384, 4096),
        case("4096x16384", 4096, 16384),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch)},
)


def main(arguments):
    return run(BENCHMARK, arguments)
