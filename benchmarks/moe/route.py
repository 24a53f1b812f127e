"""Routing of tokens to experts: XLA and ours in one launch."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(tokens: int, e: int, biased: bool = False) -> Case:
    def arrays(key):
        logits, bias = jax.random.normal(key, (tokens, e)), jnp.linspace(-0.2, 0.2, e)
        return (logits, bias) if biased else (logits,)

    return Case(f"{tokens} tokens of {e} experts", arrays, (tokens * e * 4.0, 0.0))


CASES = [case(8192, 256), case(8192, 128), case(1, 256), case(32, 256)]
SOFTMAX = Benchmark(
    "route",
    lambda logits: jaxkern.route(logits, 8),
    CASES,
    differentiable=False,
)
GROUPS = Benchmark(
    "route, sigmoid and groups",
    lambda logits: jaxkern.route(
        logits, 8, score="sigmoid", num_groups=8, top_groups=4
    ),
    CASES,
    differentiable=False,
)
BIASED = Benchmark(
    "route, sigmoid, bias and groups",
    lambda logits, bias: jaxkern.route(
        logits,
        8,
        score="sigmoid",
        correction_bias=bias,
        num_groups=8,
        top_groups=4,
        group_score="top2",
    ),
    [case(8192, 256, biased=True)],
    differentiable=False,
)
BENCHMARKS = [SOFTMAX, GROUPS, BIASED]
BENCHMARK = SOFTMAX


def main(arguments):
    return max(run(b, arguments) for b in BENCHMARKS)
