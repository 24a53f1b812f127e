"""The experts of a token mixed, normed and added to a normed residual: XLA and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(name: str, rows: int, experts: int, d: int) -> Case:
    def arrays(key):
        keys = jax.random.split(key, 5)
        shapes = (rows, experts, d), (rows, experts), (rows, d), (d,), (d,)
        return tuple(
            jax.random.normal(k, s, jnp.bfloat16)
            for k, s in zip(keys, shapes, strict=True)
        )

    tensor = 2.0 * rows * d
    # backward: outputs and their gradients, residual, dy, dresidual
    return Case(name, arrays, ((experts + 2) * tensor, (2 * experts + 3) * tensor))


BENCHMARK = Benchmark(
    "moe_rms_norm_add",
    lambda *operands: jaxkern.moe_rms_norm_add(*operands, normalize_residual=True),
    [
        case("gemma4_26b", 8192, 8, 2816),
        case("4096x8x4096", 4096, 8, 4096),
        case("1024x8x16384", 1024, 8, 16384),
    ],
)


def main(arguments):
    return run(BENCHMARK, arguments)
