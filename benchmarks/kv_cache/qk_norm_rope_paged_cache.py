"""Norm, rotation and write of a decode step into pages: one launch, the parts, XLA.

The loop of layers, steps and donated caches is that of `qk_norm_rope_cache`; its caches
are cut into pages, which is free, and a sequence's pages are in descending order.
"""

import jax.numpy as jnp

import jaxkern
from benchmarks.kv_cache.qk_norm_rope_cache import PAGE, bytes_moved, measure, ways


def in_pages(caches):
    return [x.reshape(-1, PAGE, *x.shape[2:]) for x in caches]


def slots_of(cache, positions, tokens):
    """Where the tokens go: one array for all layers, which XLA computes once a step."""
    b, s = cache.shape[:2]
    tables = jnp.arange(b * s // PAGE, dtype=jnp.int32).reshape(b, s // PAGE)[:, ::-1]
    return jaxkern.page_slots(tables, positions, tokens, PAGE)


def fused(query, key, value, fixed, caches, positions):
    slots = slots_of(caches[0], positions, query.shape[1])
    query, *pages = jaxkern.qk_norm_rope_paged_cache(
        query, key, value, *fixed, *in_pages(caches), slots
    )
    return query, *as_before(pages, caches)


def separate(query, key, value, fixed, caches, positions):
    slots = slots_of(caches[0], positions, query.shape[1])
    weights, tables = fixed
    query, key = jaxkern.qk_norm_rope(query, key, *weights, *tables)
    pairs = zip(in_pages(caches), (key, value), strict=True)
    pages = [jaxkern.update_paged_kv_cache(page, x, slots) for page, x in pairs]
    return query, *as_before(pages, caches)


def as_before(pages, caches):
    return [p.reshape(c.shape) for p, c in zip(pages, caches, strict=True)]


BY = ways(fused, separate)


def main(arguments):
    name = "qk_norm_rope_paged_cache"
    return measure(name, BY, ["bf16"], bytes_moved, arguments)
