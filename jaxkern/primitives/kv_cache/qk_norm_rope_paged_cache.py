"""`qk_norm_rope_cache` for a cache in pages: norm and rotation, then the slots.

query, pages[slots[b, i]] = qk_norm_rope(query, key)[..., i], likewise value
"""

from typing import Unpack

import jax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.kv_cache.norm_rope import NormRope, as_operands
from jaxkern.primitives.kv_cache.qk_norm_rope_cache import HEADS, NewTokens, turned
from jaxkern.primitives.kv_cache.update_paged_kv_cache import (
    update_paged_kv_cache_bwd_reference,
    update_paged_kv_cache_reference,
)
from jaxkern.primitives.rope.rope import NormedRotation


@check_arguments
def qk_norm_rope_paged_cache(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    norm_weights: tuple[Float[Array, " h"] | None, Float[Array, " h"] | None],
    tables: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    key_pages: Float[Array, "num_pages page k h"],
    value_pages: Float[Array, "num_pages page k hv"],
    slots: Int[Array, "b t"],
    *,
    norm_rope: NormRope = NormRope(),
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "num_pages page k h"],
    Float[Array, "num_pages page k hv"],
]:
    """`qk_norm_rope_cache` for pages: keys and values go to the slots of `page_slots`.

    Args:
      query, key, value, norm_weights, tables: see qk_norm_rope_cache.
      key_pages, value_pages: `[num_pages, page, k, h]` and `[num_pages, page, k, hv]`.
      slots: `[b, t]` int, as in `update_paged_kv_cache`: a token whose slot does not
        exist is dropped, of two tokens with one slot either stays.
      norm_rope: see qk_norm_rope_cache; without `value_eps`.

    Returns:
      query: `[b, t, n, h]`, dtype of query.
      key_pages, value_pages: as they came.

    Raises:
      TypeError: shapes or dtypes that do not fit.
      ValueError: a `value_eps`; as qk_norm_rope_cache.

    Example:
      >>> query, new = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 1, 4))  # one token
      >>> tables = jaxkern.rope_cos_sin(jnp.array([2]), 4)
      >>> pages, slots = jnp.zeros((2, 2, 1, 4)), jnp.array([[0]])  # of page_slots
      >>> query, keys, values = jaxkern.qk_norm_rope_paged_cache(
      ...     query, new, new, (None, None), tables, pages, pages, slots
      ... )
      >>> keys[0, :, 0]
      Array([[-1.325,  0.98 ,  0.493,  1.02 ],
             [ 0.   ,  0.   ,  0.   ,  0.   ]], dtype=float32)
    """
    op = "qk_norm_rope_paged_cache"
    turn, options = as_operands(op, query, norm_weights, tables, norm_rope)
    value_eps = options.pop("value_eps")
    if value_eps is not None:
        raise ValueError(
            f"{op}: `value_eps` of `norm_rope` is {value_eps}. Values get no norm on "
            "their way into pages: pass them through `rms_norm` and leave it out."
        )
    return qk_norm_rope_paged_cache_p(
        *(query, key, value, *turn, key_pages, value_pages, slots), **options
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
