"""`qk_norm_rope_cache` for a cache in pages: norm and rotation, then the slots.

query, pages[slots[b, i]] = qk_norm_rope(query, key)[..., i], likewise value
"""

from typing import Unpack

import jax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.kv_cache.qk_norm_rope_cache import (
    HEADS,
    NewTokens,
    check_weights,
    turned,
)
from jaxkern.primitives.kv_cache.update_paged_kv_cache import (
    update_paged_kv_cache_bwd_reference,
    update_paged_kv_cache_reference,
)
from jaxkern.primitives.rope.rope import NormedRotation, Pairing, rotary_tables


@check_arguments
def qk_norm_rope_paged_cache(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    query_weight: Float[Array, " h"] | None,
    key_weight: Float[Array, " h"] | None,
    cos: Float[Array, "b t r"],
    sin: Float[Array, "b t r"],
    key_pages: Float[Array, "num_pages page k h"],
    value_pages: Float[Array, "num_pages page k hv"],
    slots: Int[Array, "b t"],
    *,
    eps: float | None = 1e-6,
    offset: float = 0.0,
    pairing: Pairing = "neox",
    pair_offset: int | None = None,
    at_end: bool = False,
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "num_pages page k h"],
    Float[Array, "num_pages page k hv"],
]:
    """`qk_norm_rope_cache` for pages: keys and values go to the slots of `page_slots`.

    Args:
      query, key, value, query_weight, key_weight, cos, sin: see qk_norm_rope_cache.
      key_pages, value_pages: `[num_pages, page, k, h]` and `[num_pages, page, k, hv]`.
      slots: `[b, t]` int, as in `update_paged_kv_cache`: a token whose slot does not
        exist is dropped, of two tokens with one slot either stays.
      eps, offset, pairing, pair_offset, at_end: see qk_norm_rope_cache.

    Returns:
      query: `[b, t, n, h]`, dtype of query.
      key_pages, value_pages: as they came.

    Raises:
      TypeError: shapes or dtypes that do not fit.
      ValueError: as qk_norm_rope_cache.

    Example:
      >>> query, new = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 1, 4))  # one token
      >>> cos, sin = jaxkern.rope_cos_sin(jnp.array([2]), 4)
      >>> pages, slots = jnp.zeros((2, 2, 1, 4)), jnp.array([[0]])  # of page_slots
      >>> query, keys, values = jaxkern.qk_norm_rope_paged_cache(
      ...     query, new, new, None, None, cos, sin, pages, pages, slots
      ... )
      >>> keys[0, :, 0]
      Array([[-1.325,  0.98 ,  0.493,  1.02 ],
             [ 0.   ,  0.   ,  0.   ,  0.   ]], dtype=float32)
    """
    op = "qk_norm_rope_paged_cache"
    check_weights(op, query_weight, key_weight, eps)
    cos, sin, pair_offset = rotary_tables(op, query, cos, sin, pairing, pair_offset)
    options = dict(pairing=pairing, pair_offset=pair_offset, at_end=at_end)
    return qk_norm_rope_paged_cache_p(
        *(query, key, value, query_weight, key_weight, cos, sin),
        *(key_pages, value_pages, slots),
        **dict(options, eps=eps, offset=offset),
    )


def qk_norm_rope_paged_cache_reference(
    new: NewTokens,
    key_pages: Float[Array, "num_pages page k h"],
    value_pages: Float[Array, "num_pages page k hv"],
    slots: Int[Array, "b t"],
    *,
    eps: float | None,
    **rotation: Unpack[NormedRotation],
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "num_pages page k h"],
    Float[Array, "num_pages page k hv"],
]:
    query, key = turned("qk_norm_rope_paged_cache", new, eps=eps, **rotation)
    key, value = key.astype(key_pages.dtype), new.value.astype(value_pages.dtype)
    return (
        query,
        update_paged_kv_cache_reference(key_pages, key, slots),
        update_paged_kv_cache_reference(value_pages, value, slots),
    )


def qk_norm_rope_paged_cache_bwd_reference(
    new: NewTokens,
    slots: Int[Array, "b t"],
    dquery: Float[Array, "b t k*g h"],
    dkey_pages: Float[Array, "num_pages page k h"],
    dvalue_pages: Float[Array, "num_pages page k hv"],
    *,
    eps: float | None,
    **rotation: Unpack[NormedRotation],
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "b t k h"],
    Float[Array, "b t k hv"],
    Float[Array, " h"] | None,
    Float[Array, " h"] | None,
    Float[Array, "b t r"],
    Float[Array, "b t r"],
    Float[Array, "num_pages page k h"],
    Float[Array, "num_pages page k hv"],
]:
    """What a slot's gradient gives to its token goes on through rotation and norm."""
    op = "qk_norm_rope_paged_cache"
    dkey_pages, dkey = update_paged_kv_cache_bwd_reference(slots, dkey_pages)
    dvalue_pages, dvalue = update_paged_kv_cache_bwd_reference(slots, dvalue_pages)
    (_, key), transpose = jax.vjp(lambda new: turned(op, new, eps=eps, **rotation), new)
    (dnew,) = transpose((dquery, dkey.astype(key.dtype)))
    dnew = dnew._replace(value=dvalue.astype(new.value.dtype))
    return *dnew, dkey_pages, dvalue_pages


qk_norm_rope_paged_cache_p = kernel_primitive(
    qk_norm_rope_paged_cache_reference,
    bwd=qk_norm_rope_paged_cache_bwd_reference,
    replicated=(*HEADS, "num_pages", "page", "b"),
)
