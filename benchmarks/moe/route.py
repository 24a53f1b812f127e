"""Routing of tokens to experts: XLA and ours in one launch."""

import jax

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def case(tokens: int, e: int) -> Case:
    def arrays(key):
        return (jax.random.normal(key, (tokens, e)),)

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
BENCHMARK = SOFTMAX


def main(arguments):
    return max(run(b, arguments) for b in (SOFTMAX, GROUPS))
