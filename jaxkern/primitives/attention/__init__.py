"""Attention, and masks for it."""

from jaxkern.primitives.attention.attention import attention
from jaxkern.primitives.attention.cached_attention import cached_attention
from jaxkern.primitives.attention.dropout import Dropout
from jaxkern.primitives.attention.indexer_scores import indexer_scores
from jaxkern.primitives.attention.latent_attention import latent_attention
from jaxkern.primitives.attention.mask import (
    block_mask,
    make_block_mask,
    make_mask,
    padding_mask,
    segment_mask,
)
from jaxkern.primitives.attention.merge_partials import merge_partials
from jaxkern.primitives.attention.paged_attention import paged_attention
from jaxkern.primitives.attention.plain_attention import SoftcapAfterBias
from jaxkern.primitives.attention.qk_norm_rope_cache_attention import (
    qk_norm_rope_cache_attention,
)
from jaxkern.primitives.attention.quantized_cache_attention import (
    quantized_cache_attention,
)
from jaxkern.primitives.attention.select_keys import select_keys
from jaxkern.primitives.attention.sparse_attention import sparse_attention

__all__ = [
    "Dropout",
    "SoftcapAfterBias",
    "attention",
    "block_mask",
    "cached_attention",
    "indexer_scores",
    "latent_attention",
    "make_block_mask",
    "make_mask",
    "merge_partials",
    "padding_mask",
    "paged_attention",
    "qk_norm_rope_cache_attention",
    "quantized_cache_attention",
    "segment_mask",
    "select_keys",
    "sparse_attention",
]
