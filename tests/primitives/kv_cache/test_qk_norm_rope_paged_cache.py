"""qk_norm_rope_paged_cache: the three calls that it stands for."""

import jax
import jax.numpy as jnp

from jaxkern import (
    page_slots,
    qk_norm_rope,
    qk_norm_rope_paged_cache,
    update_paged_kv_cache,
)
from tests.checks import bf16, case, f32
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
        new = query, key, value, *weights, *tables
        return qk_norm_rope_paged_cache(*new, *caches, slots), expected

    same(*both(query, key, value, caches))
