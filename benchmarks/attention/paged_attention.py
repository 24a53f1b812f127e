"""Decode attention over a bf16 cache in pages, whose order is drawn at random.

Ours and XLA; beside them ours and cuDNN over the same bytes in one piece. A sequence's
pages lie next to each other, and attention over all of them does not depend on their
order: so all of them have the same result.
"""

import dataclasses

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run
from benchmarks.attention import decode_attention


def case(page: int, b: int, s: int, **heads: int) -> Case:
    given = decode_attention.case(b, s, **heads)

    def arrays(key):
        of_cache, of_order = jax.random.split(key)
        query, *cache, lengths = given.arrays(of_cache)
        pages = [x.reshape(b * s // page, page, *x.shape[2:]) for x in cache]
        orders = jax.random.split(of_order, b)
        order = jax.vmap(lambda k: jax.random.permutation(k, s // page))(orders)
        tables = order + jnp.arange(b)[:, None] * (s // page)
        return query, *pages, tables.astype(jnp.int32), lengths

    return dataclasses.replace(given, name=f"{given.name} P{page}", arrays=arrays)


def ours(query, key_pages, value_pages, tables, lengths):
    """Every query sees all keys, as in one piece."""
    pages = key_pages, value_pages
    return jaxkern.paged_attention(query, *pages, tables, lengths, causal=False)


def in_one_piece(attention):
    """`attention` over the pages as they lie, without a table."""

    def f(query, key_pages, value_pages, tables, lengths):
        shape = len(tables), -1, *key_pages.shape[2:]
        caches = key_pages.reshape(shape), value_pages.reshape(shape)
        return attention(query, *caches, lengths)

    return f


BENCHMARK = Benchmark(
    "paged_attention",
    ours,
    [
        *(case(page, 32, 4096) for page in (16, 64, 256)),
        *(case(page, 128, 1024) for page in (16, 64)),
        case(16, 1, 65536),
        case(64, 1, 65536),
        case(64, 32, 4096, n=16, k=8, h=256),
        case(64, 32, 4096, n=128, t=8),
    ],
    jax_peers={
        "jaxkern, one piece": in_one_piece(decode_attention.ours),
        "cuDNN, one piece": in_one_piece(decode_attention.cudnn_without_lengths),
    },
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
