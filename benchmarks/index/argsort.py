"""Indices that sort rows of floats: `jnp.argsort`, torch and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(rows: int, v: int, dtype) -> Case:
    def arrays(key):
        return (jax.random.normal(key, (rows, v), dtype),)

    kind = jnp.dtype(dtype)
    name = f"{rows}x{v} {kind.name}"
    return Case(name, arrays, (rows * v * (kind.itemsize + 4), 0))


def stable_argsort(case: Case, x):
    # torch's overload with `stable` takes keywords only
    return lambda x: x.argsort(dim=-1, stable=True).int()


BENCHMARK = Benchmark(
    "argsort",
    jaxkern.argsort,
    [
        case(32, 128256, jnp.float32),
        case(32, 128256, jnp.bfloat16),
        case(256, 32000, jnp.float32),
        case(1, 2**22, jnp.float32),
        case(4096, 4096, jnp.float32),
    ],
    jax_peers={"jnp.argsort": lambda x: jnp.argsort(x, -1)},
    torch_peers={"torch": stable_argsort},
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
