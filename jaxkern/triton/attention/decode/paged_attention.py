"""Attention of a few queries over pages: the decode kernel with block tables."""

from typing import Any

from jaxkern.gpu.attention.over_sequences import over_sequences
from jaxkern.triton.attention.decode import attention


def unsupported(
    query: Any, key_pages: Any, value_pages: Any, **rest: Any
) -> str | None:
    return attention.unsupported(query, value_pages, key_pages=key_pages, **rest)


def paged_attention_fwd(
    query, key_pages, value_pages, block_tables, kv_lengths, q_offset, sinks, **options
):
    pages = key_pages, value_pages, block_tables
    operands = query, *pages, kv_lengths, q_offset, sinks
    return over_sequences(attention.launch, (), (1, 2, 6), *operands, **options)
