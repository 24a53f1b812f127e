"""Cross entropy of bf16 logits, the mean over tokens: XLA, Liger, torch.compile, ours.

Liger writes the gradient over the logits in its forward pass and scales it in the
backward pass unless dloss is 1, and so does `reduction="mean"`. The loss with its
gradient, as a training step asks for them, is a benchmark of its own; in the other the
cotangent is any number, and the losses are averaged outside.
"""

import dataclasses

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


def trained_case(tokens: int, v: int) -> Case:
    """With one read and one write for both passes together."""
    both = case(tokens, v)
    return dataclasses.replace(both, bytes=(both.bytes[1], 0.0))


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


def trained(make):
    """The loss and the gradient of the logits."""

    def with_gradient(case, x, labels):
        import torch

        f = make(case, x, labels)

        def both(x, labels):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                loss = f(x, labels)
                return loss, torch.autograd.grad(loss, x)[0]

        return both

    return with_gradient


BENCHMARK = Benchmark(
    "cross_entropy",
    lambda x, labels: jnp.mean(jaxkern.cross_entropy(x, labels)),
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
    },
)


@jax.value_and_grad
def loss_and_gradient(x, labels):
    return jaxkern.cross_entropy(x, labels, reduction="mean")


TRAINED = Benchmark(
    "cross_entropy_trained",
    loss_and_gradient,
    [
        trained_case(8192, 128256),
        trained_case(8192, 32000),
        trained_case(4096, 151936),
        trained_case(2048, 262144),
        trained_case(8192, 50257),
    ],
    torch_peers={
        "torch.compile": trained(torch_compiled(by_torch)),
        "Liger": trained(liger),
    },
    differentiable=False,
)
BENCHMARKS = (BENCHMARK, TRAINED)


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
