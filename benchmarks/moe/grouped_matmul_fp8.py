"""Grouped products in 8 bits: with weights that are stored so, and of codes alone.

"grouped_matmul_fp8" rounds x of bfloat16 by rows in each call, beside `grouped_matmul`
of weights in bfloat16, and of the stored ones, which it decodes first. The product
alone stands beside torch._scaled_grouped_mm of the same codes and scales. Sizes of
groups are those of the benchmark of grouped_matmul; shares are of the rate of bfloat16.
"""

import functools

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run
from benchmarks.moe.grouped_matmul import group_sizes
from jaxkern.primitives.moe.grouped_matmul_fp8 import (
    encoded_rows,
    scaled_grouped_matmul_p,
)

SHAPES = (
    (32768, 64, 2048, 4096, True),
    (32768, 64, 2048, 4096, False),
    (65536, 256, 512, 2048, False),
)


def floats(key: jax.Array, r: int, e: int, f: int, d: int) -> tuple[jax.Array, ...]:
    x, w = jax.random.split(key)
    return (
        jax.random.normal(x, (r, d), jnp.bfloat16),
        jax.random.normal(w, (e, f, d), jnp.bfloat16) / d**0.5,
    )


def case(stored: bool, r: int, e: int, f: int, d: int, equal: bool) -> Case:
    """Codes and scales of both operands, or x and stored weights, and these decoded."""

    def arrays(key):
        x, w = floats(key, r, e, f, d)
        sizes = group_sizes(r, e, equal)
        if not stored:
            return *encoded_rows(x), *encoded_rows(w), sizes
        kept = jaxkern.quantize_fp8(w, block=(1, 0))
        return x, kept, sizes, jaxkern.dequantize(kept, dtype=jnp.bfloat16)

    small = None if r <= 2048 else case(stored, 2048, e // 4, f // 2, d // 2, equal)
    moved = float(r * d + e * f * d + 2 * r * f)
    name = f"{r}x{d}x{f} in {e}, {'equal' if equal else 'skewed'}"
    flops = 2.0 * r * f * d
    return Case(name, arrays, (moved, 0.0), (flops, 0.0), checked=small)


def of_codes(*operands):
    return scaled_grouped_matmul_p(
        *operands, preferred_element_type=jnp.dtype("bfloat16")
    )


def of_stored(x, kept, sizes, decoded):
    del decoded
    return jaxkern.grouped_matmul_fp8(x, kept, sizes)


def of_bfloat16(x, kept, sizes, decoded):
    del kept
    return jaxkern.grouped_matmul(x, decoded, sizes)


def decoded_in_the_call(x, kept, sizes, decoded):
    del decoded
    return jaxkern.grouped_matmul(x, kept, sizes)


def torch_scaled(case, *tensors, fast):
    import torch

    def f(x, x_scale, w, w_scale, sizes):
        x, w = (codes.view(torch.float8_e4m3fn) for codes in (x, w))
        return torch._scaled_grouped_mm(
            *(x, w.transpose(-2, -1), x_scale, w_scale),
            offs=sizes.cumsum(0, dtype=torch.int32),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    return f


BENCHMARK = Benchmark(
    "grouped_matmul_fp8",
    of_stored,
    [case(True, *shape) for shape in SHAPES],
    jax_peers={"bf16": of_bfloat16, "bf16, decoded first": decoded_in_the_call},
    differentiable=False,
)

CODES = Benchmark(
    "grouped_matmul_fp8, codes",
    of_codes,
    [case(False, *shape) for shape in SHAPES],
    torch_peers={
        "torch": functools.partial(torch_scaled, fast=True),
        "torch, promoted": functools.partial(torch_scaled, fast=False),
    },
    differentiable=False,
)
BENCHMARKS = [BENCHMARK, CODES]


def main(arguments):
    return max(run(benchmark, arguments) for benchmark in BENCHMARKS)
