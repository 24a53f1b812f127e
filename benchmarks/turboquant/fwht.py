"""Walsh-Hadamard transform of rows: XLA, fast_hadamard_transform and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(rows: int, d: int, dtype=jnp.bfloat16) -> Case:
    def arrays(key):
        return (jax.random.normal(key, (rows, d), dtype),)

    tensor = jnp.dtype(dtype).itemsize * rows * d
    name = f"{rows}x{d} {jnp.dtype(dtype).name}"
    return Case(name, arrays, (2.0 * tensor, 2.0 * tensor))


def dao(case, x):
    from fast_hadamard_transform import hadamard_transform

    return lambda x: hadamard_transform(x, x.shape[-1] ** -0.5)


BENCHMARK = Benchmark(
    "fwht",
    jaxkern.fwht,
    [
        case(16384, 8192),
        case(8192, 8192, jnp.float32),
        case(32768, 4096),
        case(262144, 512),
        case(1048576, 128),
        case(8192, 16384),
        case(4096, 32768),
    ],
    torch_peers={"fast_hadamard_transform": dao},
)


def main(arguments):
    return run(BENCHMARK, arguments)
