"""Cross entropy of x weight^T, bf16, the mean over tokens: plain XLA, Liger and ours.

The limit is three products. Both gradients are made in the forward pass where one is
asked for, by Liger too, so "both" is the pass to compare. Beside it stands the memory
of the temporaries, of which whole logits are twice their bytes.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(tokens: int, d: int, v: int) -> Case:
    def arrays(key):
        x, weight, label = jax.random.split(key, 3)
        return (
            jax.random.normal(x, (tokens, d), jnp.bfloat16),
            jax.random.normal(weight, (v, d), jnp.bfloat16) / d**0.5,
            jax.random.randint(label, (tokens,), 0, v),
        )

    operands = 2.0 * (tokens + v) * d
    product = 2.0 * tokens * d * v
    name = f"{tokens}x{d}x{v}"
    return Case(name, arrays, (operands, 2 * operands), (product, 2 * product))


def with_logits(x, weight, labels):
    return jaxkern.cross_entropy(x @ weight.T, labels, reduction="mean")


def plain_xla(x, weight, labels):
    with jaxkern.backend("xla"):
        return with_logits(x, weight, labels)


def liger(case, x, weight, labels):
    from liger_kernel.ops.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyFunction,
    )

    def f(x, weight, labels):
        out = LigerFusedLinearCrossEntropyFunction.apply(x, weight, labels.long())
        return out[0] if isinstance(out, tuple) else out

    return f


BENCHMARK = Benchmark(
    "linear_cross_entropy",
    lambda x, weight, labels: jaxkern.linear_cross_entropy(
        x, weight, labels, reduction="mean"
    ),
    [
        case(8192, 4096, 128256),
        case(8192, 2048, 248320),
        case(2048, 4096, 128256),
        case(8192, 2048, 32000),
    ],
    jax_peers={"all logits, ours": with_logits, "all logits, XLA": plain_xla},
    torch_peers={"Liger": liger},
    together=True,
    temporaries=True,
)


def main(arguments):
    return run(BENCHMARK, arguments)
