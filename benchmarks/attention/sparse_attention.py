"""Decode attention over selected keys, bf16: tokens of a latent cache, and blocks.

DeepSeek V3.2 selects 2048 tokens for all 128 heads of its latent cache of 512 + 64
dims; NSA 16 blocks of 64 keys for each of 4 key heads.
"""

import functools

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

VALUE_DIM, ROTATED_DIM = 512, 64
TOKENS = 2048
BLOCK_SIZE, BLOCKS = 64, 16


def drawn_lists(key: jax.Array, shape: tuple[int, ...], selected: int, of: int):
    """`[*shape, selected]`, in each row so many of the numbers below `of`."""
    keys = jax.random.split(key, shape)

    def one(key):
        return jax.random.choice(key, of, (selected,), replace=False)

    for _ in shape:
        one = jax.vmap(one)
    return one(keys).astype(jnp.int32)


def latent_case(b: int, s: int, n: int = 128) -> Case:
    h = VALUE_DIM + ROTATED_DIM

    def arrays(key):
        q, x, i = jax.random.split(key, 3)
        return (
            jax.random.normal(q, (b, 1, n, h), jnp.bfloat16),
            jax.random.normal(x, (b, s, 1, h), jnp.bfloat16),
            drawn_lists(i, (b, 1, 1), TOKENS, s),
        )

    size = 2.0 * (b * TOKENS * h + b * n * (h + VALUE_DIM)) + 4.0 * b * TOKENS
    flops = 2.0 * b * n * TOKENS * (h + VALUE_DIM)
    return Case(f"tokens B{b} S{s} H{n}", arrays, (size, 0.0), (flops, 0.0))


def block_case(b: int, s: int, k: int = 4, g: int = 16, h: int = 128) -> Case:
    def arrays(key):
        *keys, i = jax.random.split(key, 4)
        shapes = (b, 1, k * g, h), (b, s, k, h), (b, s, k, h)
        query, *cache = (
            jax.random.normal(x, shape, jnp.bfloat16)
            for x, shape in zip(keys, shapes, strict=True)
        )
        return query, *cache, drawn_lists(i, (b, 1, k), BLOCKS, s // BLOCK_SIZE)

    rows = b * k * BLOCKS * BLOCK_SIZE
    size = 2.0 * (2 * rows * h + 2 * b * k * g * h)
    return Case(f"blocks B{b} S{s} H{k * g}", arrays, (size, 0.0))


def ours(query, key, *value_and_indices):
    """A cache without values is the latent one."""
    *value, indices = value_and_indices
    attend = functools.partial(
        jaxkern.sparse_attention, query, key, unique_indices=True
    )
    if value:
        return attend(*value, indices, block_size=BLOCK_SIZE)
    return attend(None, indices, value_dim=VALUE_DIM, scale=192**-0.5)


BENCHMARK = Benchmark(
    "sparse_attention",
    ours,
    [
        latent_case(128, 8192),
        latent_case(32, 32768),
        latent_case(1, 131072),
        latent_case(32, 32768, n=16),
        block_case(128, 8192),
        block_case(8, 32768),
        block_case(1, 131072),
    ],
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
