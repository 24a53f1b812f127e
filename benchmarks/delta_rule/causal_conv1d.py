"""Causal convolution of 4 taps with silu: XLA, torch.compile, Dao's kernel and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled


def case(b: int, t: int, d: int) -> Case:
    def arrays(key):
        x, weight = jax.random.split(key)
        return (
            jax.random.normal(x, (b, t, d), jnp.bfloat16),
            jax.random.normal(weight, (d, 4), jnp.bfloat16),
        )

    tensor = 2.0 * b * t * d
    return Case(f"{b}x{t}x{d}", arrays, (2 * tensor, 3 * tensor))


def convolved(x, weight):
    return jaxkern.causal_conv1d(x, weight, activation="silu")[0]


def by_torch(torch, x, weight):
    f = torch.nn.functional
    y = f.conv1d(f.pad(x.mT, (3, 0)), weight[:, None], groups=x.shape[-1])
    return f.silu(y).mT


def dao(case, x, weight):
    from causal_conv1d import causal_conv1d_fn

    return lambda x, w: causal_conv1d_fn(x.mT, w, activation="silu").mT


BENCHMARK = Benchmark(
    "causal_conv1d",
    convolved,
    [
        case(1, 32768, 8192),
        case(8, 4096, 8192),
        case(1, 4096, 4096),
        case(4, 8192, 2048),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch), "causal_conv1d": dao},
)


def main(arguments):
    return run(BENCHMARK, arguments)
