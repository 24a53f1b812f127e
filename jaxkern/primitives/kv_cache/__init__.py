"""Caches of keys and values."""

from jaxkern.primitives.kv_cache.kv_cache import (
    KVCache,
    append_kv_cache,
    empty_kv_cache,
)
from jaxkern.primitives.kv_cache.norm_rope import NormRope
from jaxkern.primitives.kv_cache.paged_kv_cache import (
    PagedKVCache,
    allocate_pages,
    append_paged_kv_cache,
    empty_paged_kv_cache,
    release_pages,
)
from jaxkern.primitives.kv_cache.qk_norm_rope_cache import (
    qk_norm_rope_cache,
    qk_norm_rope_quantized_cache,
)
from jaxkern.primitives.kv_cache.qk_norm_rope_paged_cache import (
    qk_norm_rope_paged_cache,
)
from jaxkern.primitives.kv_cache.update_kv_cache import ring_positions, update_kv_cache
from jaxkern.primitives.kv_cache.update_paged_kv_cache import (
    gather_pages,
    page_slots,
    update_paged_kv_cache,
)
from jaxkern.primitives.kv_cache.update_quantized_kv_cache import (
    update_quantized_kv_cache,
)

__all__ = [
    "KVCache",
    "NormRope",
    "PagedKVCache",
    "allocate_pages",
    "append_kv_cache",
    "append_paged_kv_cache",
    "empty_kv_cache",
    "empty_paged_kv_cache",
    "gather_pages",
    "page_slots",
    "qk_norm_rope_cache",
    "qk_norm_rope_paged_cache",
    "qk_norm_rope_quantized_cache",
    "release_pages",
    "ring_positions",
    "update_kv_cache",
    "update_paged_kv_cache",
    "update_quantized_kv_cache",
]
