"""From the projections of a layer to its cache: norm and rotation, then the write.

query, cache[b, positions[b] + i] = qk_norm_rope(query, key)[..., i], likewise value
"""

from typing import NamedTuple, Unpack

import jax
from jaxtyping import Array, Float, Int, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.kv_cache.norm_rope import NormRope, as_operands
from jaxkern.primitives.kv_cache.update_kv_cache import update_kv_cache_reference
from jaxkern.primitives.kv_cache.update_quantized_kv_cache import quantize_into
from jaxkern.primitives.norm.rms_norm import rms_norm_fwd_reference
from jaxkern.primitives.rope.rope import NormedRotation, check_pairs, rotate
from jaxkern.primitives.turboquant.quantized_vectors import (
    QuantizedVectors,
    check_quantized_vectors,
)
from jaxkern.primitives.turboquant.vector_codec import VectorCodec


@check_arguments
def qk_norm_rope_cache(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    norm_weights: tuple[Float[Array, " h"] | None, Float[Array, " h"] | None],
    tables: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    key_cache: Float[Array, "b s k h"],
    value_cache: Float[Array, "b s k hv"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None = None,
    *,
    ring: bool = False,
    norm_rope: NormRope = NormRope(),
) -> tuple[
    Float[Array, "b t k*g h"], Float[Array, "b s k h"], Float[Array, "b s k hv"]
]:
    """Normalises and rotates queries and keys, writes keys and values to the cache.

        query, key  = qk_norm_rope(query, key, *norm_weights, *tables)
        key_cache   = update_kv_cache(key_cache, key, positions, new_lengths)
        value_cache = update_kv_cache(value_cache, value, positions, new_lengths)

    with one rounding: a key goes to the cache from float32, not by way of key.dtype,
    and so does a value with a norm. All that a decode step does between its projection
    and its attention, so that a kernel reads each new vector once and starts once.
    Donate the caches to `jit`, or carry them through a loop: they are written in place.

    A token whose slot is outside is dropped, and in a ring the last s tokens stay, as
    in `update_kv_cache`. Gradients are those of the three calls.

    Args:
      query: `[b, t, n, h]`, any float dtype; n = k*g heads, a multiple of key's.
      key, value: `[b, t, k, h]` and `[b, t, k, hv]`, any float dtype.
      norm_weights: of the queries and of the keys, each `[h]`, or None for no scale.
      tables: cos and sin, `[b, t, r]` or `[t, r]`, from `rope_cos_sin`; its positions
        may be other ones than the slots.
      key_cache, value_cache: `[b, s, k, h]` and `[b, s, k, hv]`.
      positions: `[b]` int, slot of the first new token of each sequence, may be traced.
        A number counts for all.
      new_lengths: `[b]` int, how many of the t tokens count. Default t.
      ring: slots are taken modulo s.
      norm_rope: how heads are normalised and rotated, and whether they are.

    Returns:
      query: `[b, t, n, h]`, dtype of query.
      key_cache, value_cache: in their dtypes.

    Raises:
      TypeError: shapes or dtypes that do not fit.
      ValueError: an unknown pairing, pairs that overlap or leave the head, or weights
        without a norm.

    Example:
      >>> query, new = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 1, 4))  # one token
      >>> tables = jaxkern.rope_cos_sin(jnp.array([2]), 4)
      >>> caches = jnp.zeros((1, 3, 1, 4)), jnp.zeros((1, 3, 1, 4))
      >>> query, keys, values = jaxkern.qk_norm_rope_cache(
      ...     query, new, new, (None, None), tables, *caches, jnp.array([2])
      ... )
      >>> keys[0, :, 0]  # rotated, in the slot of its position
      Array([[ 0.   ,  0.   ,  0.   ,  0.   ],
             [ 0.   ,  0.   ,  0.   ,  0.   ],
             [-1.325,  0.98 ,  0.493,  1.02 ]], dtype=float32)
    """
    op = "qk_norm_rope_cache"
    turn, options = as_operands(op, query, norm_weights, tables, norm_rope)
    return qk_norm_rope_cache_p(
        *(query, key, value, *turn, key_cache, value_cache),
        per_sequence(op, "positions", positions, query.shape[:1]),
        new_lengths,
        ring=ring,
        **options,
    )


@check_arguments
def qk_norm_rope_quantized_cache(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    norm_weights: tuple[Float[Array, " h"] | None, Float[Array, " h"] | None],
    tables: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    key_cache: QuantizedVectors,
    value_cache: QuantizedVectors,
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None = None,
    *,
    ring: bool = False,
    norm_rope: NormRope = NormRope(),
) -> tuple[Float[Array, "b t k*g h"], QuantizedVectors, QuantizedVectors]:
    """`qk_norm_rope_cache` for a quantised cache: `update_quantized_kv_cache` of both.

    A key is quantised from float32. Codes have no gradient, scales do.

    Args:
      query, key, value, norm_weights, tables: see qk_norm_rope_cache.
      key_cache, value_cache: `[b, s, k, h]` and `[b, s, k, hv]`, each with a codec of
        its own.
      positions, new_lengths, ring, norm_rope: see qk_norm_rope_cache.

    Returns:
      query: `[b, t, n, h]`, dtype of query.
      key_cache, value_cache: scales in the dtypes that they have.

    Raises:
      TypeError: shapes or dtypes that do not fit.
      ValueError: as qk_norm_rope_cache.

    Example:
      >>> query, new = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 1, 4))  # one token
      >>> tables = jaxkern.rope_cos_sin(jnp.array([2]), 4)
      >>> empty = jaxkern.QuantizedVectors.zeros((1, 3, 1, 4), jaxkern.IntCodec(8))
      >>> query, keys, values = jaxkern.qk_norm_rope_quantized_cache(
      ...     query, new, new, (None, None), tables, empty, empty, jnp.array([2])
      ... )
      >>> jaxkern.dequantize_vectors(keys)[0, 2]
      Array([[-1.325,  0.981,  0.491,  1.023]], dtype=float32)
    """
    op = "qk_norm_rope_quantized_cache"
    check_quantized_vectors(op, "key_cache", key_cache)
    check_quantized_vectors(op, "value_cache", value_cache)
    turn, options = as_operands(op, query, norm_weights, tables, norm_rope)
    query, key_codes, key_scales, value_codes, value_scales = (
        qk_norm_rope_quantized_cache_p(
            *(query, key, value, *turn),
            *(key_cache.codes, key_cache.scales),
            *(value_cache.codes, value_cache.scales),
            per_sequence(op, "positions", positions, query.shape[:1]),
            new_lengths,
            key_codec=key_cache.codec,
            value_codec=value_cache.codec,
            ring=ring,
            **options,
        )
    )
    return (
        query,
        QuantizedVectors(key_codes, key_scales, key_cache.codec),
        QuantizedVectors(value_codes, value_scales, value_cache.codec),
    )


class NewTokens(NamedTuple):
    """What the projections of a layer give, and how it is turned."""

    query: Float[Array, "b t k*g h"]
    key: Float[Array, "b t k h"]
    value: Float[Array, "b t k hv"]
    query_weight: Float[Array, " h"] | None
    key_weight: Float[Array, " h"] | None
    cos: Float[Array, "b t r"]
    sin: Float[Array, "b t r"]


def turned(
    op: str,
    new: NewTokens,
    *,
    eps: float | None,
    offset: float,
    pairing: str,
    pair_offset: int,
    at_end: bool,
) -> tuple[jax.Array, jax.Array]:
    """The query in its own dtype, the key in float32."""
    check_pairs(op, new.query.shape[-1], new.cos.shape[-1], pair_offset)

    def one(x, weight):
        x = at_least_f32(x)
        if eps is not None:
            x, _ = rms_norm_fwd_reference(x, weight, None, eps=eps, offset=offset)
        return rotate(x, new.cos, new.sin, pairing, pair_offset, at_end)

    query = one(new.query, new.query_weight).astype(new.query.dtype)
    return query, one(new.key, new.key_weight)


def normed_value(
    value: Float[Array, "b t k hv"], eps: float | None
) -> Float[Array, "b t k hv"]:
    """Values in float32 if they have a norm, else as they are."""
    if eps is None:
        return value
    normed, _ = rms_norm_fwd_reference(
        at_least_f32(value), None, None, eps=eps, offset=0.0
    )
    return normed


def qk_norm_rope_cache_reference(
    new: NewTokens,
    key_cache: Float[Array, "b s k h"],
    value_cache: Float[Array, "b s k hv"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None,
    *,
    ring: bool,
    eps: float | None,
    value_eps: float | None,
    **rotation: Unpack[NormedRotation],
) -> tuple[
    Float[Array, "b t k*g h"], Float[Array, "b s k h"], Float[Array, "b s k hv"]
]:
    query, key = turned("qk_norm_rope_cache", new, eps=eps, **rotation)
    slots, value = (positions, new_lengths), normed_value(new.value, value_eps)
    return (
        query,
        update_kv_cache_reference(key_cache, key, *slots, ring=ring),
        update_kv_cache_reference(value_cache, value, *slots, ring=ring),
    )


def qk_norm_rope_quantized_cache_reference(
    new: NewTokens,
    key_codes: UInt8[Array, "b s k key_bytes"],
    key_scales: Float[Array, "b s k key_groups"],
    value_codes: UInt8[Array, "b s k value_bytes"],
    value_scales: Float[Array, "b s k value_groups"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None,
    *,
    key_codec: VectorCodec,
    value_codec: VectorCodec,
    ring: bool,
    eps: float | None,
    value_eps: float | None,
    **rotation: Unpack[NormedRotation],
) -> tuple[
    Float[Array, "b t k*g h"],
    UInt8[Array, "b s k key_bytes"],
    Float[Array, "b s k key_groups"],
    UInt8[Array, "b s k value_bytes"],
    Float[Array, "b s k value_groups"],
]:
    op = "qk_norm_rope_quantized_cache"
    query, key = turned(op, new, eps=eps, **rotation)
    slots, value = (positions, new_lengths), normed_value(new.value, value_eps)
    return (
        query,
        *quantize_into(op, key_codes, key_scales, key, slots, key_codec, ring),
        *quantize_into(op, value_codes, value_scales, value, slots, value_codec, ring),
    )


# The caches have no g: were it cut, each device's part would be added. A token's slot
# may be on any device; a norm, a pair and a quantised vector need the whole head.
CODE_DIMS = "key_bytes", "key_groups", "value_bytes", "value_groups"
HEADS = ("g", "h", "hv", "r", "t")
qk_norm_rope_cache_p = kernel_primitive(
    qk_norm_rope_cache_reference, replicated=(*HEADS, "s")
)
qk_norm_rope_quantized_cache_p = kernel_primitive(
    qk_norm_rope_quantized_cache_reference,
    replicated=(*HEADS, "s", *CODE_DIMS),
)
