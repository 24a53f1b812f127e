"""One token per row of logits, with each cut: XLA, torch.compile and ours."""

import functools

import jax
import jax.numpy as jnp

from benchmarks._gpu import Benchmark, Case, run, torch_compiled
from jaxkern.primitives.sampling.sample import sample_p

CUTS = {
    "sample": {},
    "sample_top_k": {"top_k": 64},
    "sample_top_p": {"top_p": 0.9},
    "sample_min_p": {"min_p": 0.1},
    "sample_all": {"top_k": 64, "top_p": 0.9, "min_p": 0.1},
}

SHAPES = [
    (32, 128256, jnp.float32, 1.0),
    (32, 128256, jnp.float32, 4.0),
    (32, 128256, jnp.bfloat16, 4.0),
    (1, 128256, jnp.float32, 4.0),
    (256, 32000, jnp.float32, 4.0),
    (128, 50257, jnp.float32, 1.0),
    (128, 50257, jnp.float32, 4.0),
]


def case(rows: int, v: int, dtype, scale: float, *, reference: bool = True) -> Case:
    """At scale 1 top_p keeps a third of all tokens, at scale 4 some hundred.

    XLA compiles the reference of top_p for minutes: it is
    compared at a 64th of the width, and not measured.
    """

    def arrays(key):
        logits, uniform = jax.random.split(key)
        # drawn in float32: normal numbers of bfloat16 have few values, and so ties
        x = scale * jax.random.normal(logits, (rows, v))
        return x.astype(dtype), jax.random.uniform(uniform, (rows,))

    size = jnp.dtype(dtype).itemsize
    name = f"{rows}x{v} {jnp.dtype(dtype).name} scale {scale:g}"
    fewer = None if reference else case(rows, v // 64, dtype, scale)
    return Case(
        name, arrays, (rows * v * size, 0.0), reference=reference, checked=fewer
    )


def draw(logits, uniform, *, top_k=None, top_p=None, min_p=None):
    def per_row(x, dtype):
        return None if x is None else jnp.full(uniform.shape, x, dtype)

    return sample_p(
        logits,
        uniform,
        jnp.full(uniform.shape, 0.8, jnp.float32),
        per_row(top_k, jnp.int32),
        per_row(top_p, jnp.float32),
        per_row(min_p, jnp.float32),
    )


def draw_by_torch(torch, logits, uniform, *, top_k=None, top_p=None, min_p=None):
    p = torch.softmax(logits.float() / 0.8, -1)
    if top_k is not None:
        p = torch.where(p >= torch.topk(p, top_k).values[:, -1:], p, 0)
    if top_p is not None:
        ordered, _ = torch.sort(p, descending=True)
        upto = torch.cumsum(ordered, -1)
        last = (upto < top_p * upto[:, -1:]).sum(-1, keepdim=True)
        p = torch.where(p >= ordered.gather(-1, last), p, 0)
    if min_p is not None:
        p = torch.where(p >= min_p * p.amax(-1, keepdim=True), p, 0)
    cdf = torch.cumsum(p, -1)
    return (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1).int()


BENCHMARKS = [
    Benchmark(
        name,
        functools.partial(draw, **cuts),
        [
            case(rows, v, dtype, scale, reference="top_p" not in cuts)
            for rows, v, dtype, scale in SHAPES
        ],
        torch_peers={
            "torch.compile": torch_compiled(functools.partial(draw_by_torch, **cuts))
        },
        differentiable=False,
    )
    for name, cuts in CUTS.items()
]
BENCHMARK = BENCHMARKS[1]


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
