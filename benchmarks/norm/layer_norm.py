"""LayerNorm with weight and bias: XLA, Liger, torch.compile and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled

EPS = 1e-5


def case(rows: int, d: int) -> Case:
    def arrays(key):
        x, weight, bias = jax.random.split(key, 3)
        return (
            jax.random.normal(x, (rows, d), jnp.bfloat16),
            jax.random.normal(weight, (d,), jnp.bfloat16),
            jax.random.normal(bias, (d,), jnp.bfloat16),
        )

    tensor = 2.0 * rows * d
    return Case(f"{rows}x{d}", arrays, (2 * tensor, 3 * tensor))


def liger(case, x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS)


def by_torch(torch, x, weight, bias):
    f = torch.nn.functional.layer_norm
    return f(x, (x.shape[-1],), weight, bias, EPS)


BENCHMARK = Benchmark(
    "layer_norm",
    lambda x, weight, bias: jaxkern.layer_norm(x, weight, bias, eps=EPS),
    [case(16384, 4096), case(8192, 8192), case(65536, 1024)],
    torch_peers={"torch.compile": torch_compiled(by_torch), "Liger": liger},
)


def main(arguments):
    return run(BENCHMARK, arguments)
