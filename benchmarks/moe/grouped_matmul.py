"""Grouped products, bf16: XLA, torch, ours by Triton, and by Mosaic GPU on Hopper.

`groups` are equal, or drawn so that their sizes differ by a factor of ten. torch's peer
is `torch._grouped_mm`, of which the backward pass is two products likewise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def group_sizes(r: int, e: int, equal: bool) -> jax.Array:
    """Of `r` rows in all; drawn from a Dirichlet distribution where not equal."""
    if equal:
        return jnp.full(e, r // e, jnp.int32)
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.multinomial(r, rng.dirichlet(np.full(e, 4.0))), jnp.int32)


def case(r: int, e: int, f: int, d: int, equal: bool) -> Case:
    def arrays(key):
        x, w = jax.random.split(key)
        return (
            jax.random.normal(x, (r, d), jnp.bfloat16),
            jax.random.normal(w, (e, f, d), jnp.bfloat16) / d**0.5,
            group_sizes(r, e, equal),
        )

    name = f"{r}x{d}x{f} in {e}, {'equal' if equal else 'skewed'}"
    moved = 2.0 * (r * (d + f) + e * f * d)
    product = 2.0 * r * f * d
    # XLA's loop over blocks is 8 to 20 times as slow; it is checked where it is small
    small = None if r <= 2048 else case(2048, e // 4, f // 2, d // 2, equal)
    return Case(name, arrays, (moved, 2 * moved), (product, 2 * product), checked=small)


def by(name: str, f, *operands):
    with jaxkern.backend(name, strict=name != "xla"):
        return f(*operands)


def torch_grouped(case, x, w, sizes):
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, stops):
            ctx.save_for_backward(x, w, stops)
            return torch._grouped_mm(x, w.transpose(-2, -1), offs=stops)

        @staticmethod
        def backward(ctx, *cotangents):
            (dy,), (x, w, stops) = cotangents, ctx.saved_tensors
            dx = torch._grouped_mm(dy, w, offs=stops)
            return dx, torch._grouped_mm(dy.t(), x, offs=stops), None

    def f(x, w, sizes):
        stops = sizes.cumsum(0, dtype=torch.int32)
        return Product.apply(x, w, stops)

    return f


BENCHMARK = Benchmark(
    "grouped_matmul",
    jaxkern.grouped_matmul,
    [
        case(32768, 64, 2048, 4096, True),
        case(32768, 64, 2048, 4096, False),
        case(65536, 256, 512, 2048, False),
    ],
    jax_peers={"Triton": functools.partial(by, "triton", jaxkern.grouped_matmul)},
    torch_peers={"torch": torch_grouped},
    floats=(0, 1),
)


def main(arguments):
    return run(BENCHMARK, arguments)
