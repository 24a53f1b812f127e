"""New vectors into a quantised cache: their codes by one launch, written by XLA."""

from typing import Any

from jaxkern.primitives.kv_cache.update_kv_cache import update_kv_cache_reference
from jaxkern.primitives.turboquant.vector_codec import VectorCodec
from jaxkern.triton.turboquant import quantize_vectors
from jaxkern.triton.turboquant.quantize_vectors import quantize_vectors_fwd


def unsupported(
    codec: VectorCodec, new: Any = None, dscales: Any = None, **rest: Any
) -> str | None:
    if dscales is not None:
        return "the gradient has no kernel"
    return quantize_vectors.unsupported(codec, x=new)


def update_quantized_kv_cache_fwd(
    codes, scales, new, positions, new_lengths, *, codec, ring
):
    """One launch for the new vectors; XLA writes them into the cache in place."""
    new_codes, new_scales = quantize_vectors_fwd(new, codec=codec)
    slots = (positions, new_lengths)
    return (
        update_kv_cache_reference(codes, new_codes, *slots, ring=ring),
        update_kv_cache_reference(scales, new_scales, *slots, ring=ring),
    )
