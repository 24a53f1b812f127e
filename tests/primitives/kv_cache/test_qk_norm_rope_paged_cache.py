"""qk_norm_rope_paged_cache: the three calls that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import (
    IntCodec,
    NormRope,
    QuantizedVectors,
    page_slots,
    qk_norm_rope,
    qk_norm_rope_cache,
    qk_norm_rope_paged_cache,
    qk_norm_rope_quantized_cache,
    update_kv_cache,
    update_paged_kv_cache,
    update_quantized_kv_cache,
)
from jaxkern.testing.checks import bf16, case, f32
from tests.primitives.kv_cache.test_qk_norm_rope_cache import LLAMA3, draw, heads, same
from tests.primitives.kv_cache.test_update_paged_kv_cache import some_slots

CASES = [
    case(
        "plain",
        full=True,
        **heads(2, 3, 4, 2, 8, r=3, hv=4),
        key_pages=f32(4, 2, 2, 8),
        value_pages=f32(4, 2, 2, 4),
        slots=some_slots(2, 3, 8, outside=2),
    ),
    case(
        "llama3_8b_decode",
        full=True,
        **heads(4, 1, 32, 8, 128, r=64, spec=bf16) | LLAMA3,
        key_pages=bf16(16, 16, 8, 128),
        value_pages=bf16(16, 16, 8, 128),
        slots=some_slots(4, 1, 256),
    ),
]


def test_it_is_norm_rotation_and_update():
    (query, key, value), weights, tables = draw(2, 5, 4, 2, 16)
    caches = jnp.full((6, 4, 2, 16), 7.0), jnp.full((6, 4, 2, 16), 8.0)
    slots = page_slots(jnp.array([[5, 2], [1, -1]]), jnp.array([3, 2]), 5, 4)

    @jax.jit
    def both(query, key, value, caches):
        y_query, y_key = qk_norm_rope(query, key, *weights, *tables)
        pairs = zip(caches, (y_key, value), strict=True)
        expected = y_query, *(update_paged_kv_cache(*pair, slots) for pair in pairs)
        new = query, key, value, weights, tables
        return qk_norm_rope_paged_cache(*new, *caches, slots), expected

    same(*both(query, key, value, caches))


def test_the_last_dims_of_a_head_turn_in_every_cache():
    """Other tests of the three turn whole heads, where first and last are the same."""
    (query, key, value), weights, tables = draw(2, 3, 2, 1, 16)
    tables = [x[..., :3] for x in tables]
    new = query, key, value, weights, tables
    at_end = dict(norm_rope=NormRope(at_end=True))
    cache, at = jnp.zeros((2, 4, 1, 16)), jnp.array([0, 1])
    codes = QuantizedVectors(
        jnp.zeros((2, 4, 1, 16), jnp.uint8), jnp.zeros((2, 4, 1, 1)), IntCodec(8)
    )
    pages = jnp.zeros((2, 4, 1, 16))

    @jax.jit
    def every(*new):
        last = *new[3], *new[4]
        y_query, y_key = qk_norm_rope(*new[:2], *last, at_end=True)
        slots = at[:, None] + 4 * jnp.arange(2)[:, None] + jnp.arange(3)
        found = [
            qk_norm_rope_cache(*new, cache, cache, at, **at_end),
            qk_norm_rope_quantized_cache(*new, codes, codes, at, **at_end),
            qk_norm_rope_paged_cache(*new, pages, pages, slots, **at_end),
        ]
        expected = [
            (y_query, *(update_kv_cache(cache, x, at) for x in (y_key, value))),
            (
                y_query,
                *(update_quantized_kv_cache(codes, x, at) for x in (y_key, value)),
            ),
            (
                y_query,
                *(update_paged_kv_cache(pages, x, slots) for x in (y_key, value)),
            ),
        ]
        return found, expected, qk_norm_rope(*new[:2], *last)[0]

    found, expected, at_front = every(*new)
    same(found, expected)
    assert np.abs(found[0][0] - at_front).max() > 0.1
