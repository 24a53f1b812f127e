"""Cross entropy of bf16 logits, the mean over tokens: XLA, Liger, torch.compile, ours.

Liger writes the gradient over the logits in its forward pass and scales it in the
backward pass unless dloss is 1: it is measured both ways.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled


def case(tokens: int, v: int) -> Case:
    def arrays(key):
        x, label = jax.random.split(key)
        return (
            3 * jax.random.normal(x, (tokens, v), jnp.bfloat16),
            jax.random.randint(label, (tokens,), 0, v),
        )

    tensor = 2.0 * tokens * v
    fewer = case(256, v) if tokens > 256 else None
    return Case(f"{tokens}x{v}", arrays, (tensor, 2 * tensor), checked=fewer)


def by_torch(torch, x, labels):
    return torch.nn.functional.cross_entropy(x.float(), labels.long())


def liger(case, x, labels):
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def f(x, labels):
        loss, *_ = LigerCrossEntropyFunction.apply(
            x, labels.long(), None, -100, 0.0, 0.0, "mean", None, False
        )
        return loss

    return f


def liger_of_one(case, x, labels):
    import torch

    class OfOne(torch.autograd.Function):
        """The identity, whose cotangent is 1 whatever comes."""

        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, dloss):
            return torch.ones_like(dloss)

    f = liger(case, x, labels)
    return lambda x, labels: OfOne.apply(f(x, labels))


BENCHMARK = Benchmark(
    "cross_entropy",
    lambda x, labels: jaxkern.cross_entropy(x, labels, reduction="mean"),
    [
        case(8192, 128256),
        case(8192, 32000),
        case(8192, 50257),
        case(2048, 256000),
        case(16, 256000),
        case(65536, 1000),
    ],
    torch_peers={
        "torch.compile": torch_compiled(by_torch),
        "Liger": liger,
        "Liger, dloss = 1": liger_of_one,
    },
    sizes={
        "cross_entropy_fwd": {"DEPTH": (2, 4, 8), "num_warps": (4, 8, 16, 32)},
        "cross_entropy_bwd": {"BLOCK": (2048, 4096, 8192), "num_warps": (4, 8)},
    },
)


def main(arguments):
    return run(BENCHMARK, arguments)
