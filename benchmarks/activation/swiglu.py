"""SwiGLU, elementwise: XLA, Liger, torch.compile and ours."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled


def case(rows: int, f: int) -> Case:
    def arrays(key):
        return tuple(
            jax.random.normal(k, (rows, f), jnp.bfloat16) for k in jax.random.split(key)
        )

    tensor = 2.0 * rows * f
    return Case(f"{rows}x{f}", arrays, (3 * tensor, 5 * tensor))


def liger(case, gate, up):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


BENCHMARK = Benchmark(
    "swiglu",
    jaxkern.swiglu,
    [case(8192, 14336), case(2048, 11008), case(8192, 32768)],
    torch_peers={
        "torch.compile": torch_compiled(
            lambda torch, gate, up: torch.nn.functional.silu(gate) * up
        ),
        "Liger": liger,
    },
)


def main(arguments):
    return run(BENCHMARK, arguments)
