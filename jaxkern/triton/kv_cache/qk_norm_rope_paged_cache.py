"""qk_norm_rope_cache into pages: the same launch, its slots those of all pages."""

from jaxkern.triton.kv_cache.qk_norm_rope_cache import unsupported as unsupported
from jaxkern.triton.kv_cache.qk_norm_rope_cache import write


def qk_norm_rope_paged_cache(*operands, **options):
    *new, key_pages, value_pages, slots = operands
    num_pages, page = key_pages.shape[:2]
    query, keys, _, values, _ = write(
        new,
        (key_pages, None, value_pages, None),
        (None, None, slots),
        (None, None),
        num_pages * page,
        False,
        **options,
    )
    return query, keys, values
