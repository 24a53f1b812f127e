"""Quantised key/value cache: quantises the new tokens, writes them to their slots.

cache[b, positions[b] + i] = quantize(new[b, i])      (ring: slot modulo s)
"""

import jax
from jaxtyping import Array, Float, Int, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.kv_cache.update_kv_cache import update_kv_cache_reference
from jaxkern.primitives.turboquant.quantized_vectors import (
    QuantizedVectors,
    check_quantized_vectors,
)
from jaxkern.primitives.turboquant.vector_codec import VectorCodec, encode, num_dims


@check_arguments
def update_quantized_kv_cache(
    cache: QuantizedVectors,
    new: Float[Array, "b t k h"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None = None,
    *,
    ring: bool = False,
) -> QuantizedVectors:
    """The cache with new tokens, quantised, at their slots.

        cache[b, positions[b] + i] = quantize_vectors(new[b, i], cache.codec)

    Slots as in `update_kv_cache`: a token outside is dropped, a ring keeps the last s
    tokens. Each vector is quantised by itself, so a token costs the same error
    whenever it is written. Donate the cache to `jit` to write it in place.

    `QuantizedVectors.zeros((b, s, k, h), codec)` is an empty cache. Its size as a part
    of float32 keys and values, for h = 256:

    | keys        | values      | smaller by |
    |-------------|-------------|------------|
    | float16     | TurboQuant8 | 2.65       |
    | TurboQuant8 | TurboQuant8 | 3.94       |
    | int4, g 32  | int4, g 32  | 6.40       |
    | TurboQuant4 | TurboQuant4 | 7.76       |

    Args:
      cache: `[b, s, k, h]`, s slots.
      new: `[b, t, k, h]`, any float dtype.
      positions: `[b]` int, position of new[:, 0] in each sequence, may be traced. A
        number counts for all.
      new_lengths: `[b]` int, how many of the t tokens count. Default t.
      ring: slots are taken modulo s.

    Returns:
      The cache; scales in the dtype that they have.

    Raises:
      TypeError: shapes that do not fit.

    Example:
      >>> cache = jaxkern.QuantizedVectors.zeros((1, 3, 1, 4), jaxkern.IntCodec(8))
      >>> new = jnp.ones((1, 1, 1, 4))
      >>> cache = jaxkern.update_quantized_kv_cache(cache, new, jnp.array([2]))
      >>> jaxkern.dequantize_vectors(cache)[0, 2]
      Array([[1., 1., 1., 1.]], dtype=float32)
    """
    op = "update_quantized_kv_cache"
    check_quantized_vectors(op, "cache", cache)
    codes, scales = update_quantized_kv_cache_p(
        cache.codes,
        cache.scales,
        new,
        per_sequence(op, "positions", positions, cache.codes.shape[:1]),
        new_lengths,
        codec=cache.codec,
        ring=ring,
    )
    return QuantizedVectors(codes, scales, cache.codec)


def update_quantized_kv_cache_reference(
    codes: UInt8[Array, "b s k code_bytes"],
    scales: Float[Array, "b s k groups"],
    new: Float[Array, "b t k h"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None,
    *,
    codec: VectorCodec,
    ring: bool,
) -> tuple[UInt8[Array, "b s k code_bytes"], Float[Array, "b s k groups"]]:
    op = "update_quantized_kv_cache"
    slots = positions, new_lengths
    return quantize_into(op, codes, scales, new, slots, codec, ring)


def quantize_into(op, codes, scales, new, slots, codec, ring):
    """Codes and scales of a cache with those of new `[b, t, k, h]` at their slots."""
    h, cached = new.shape[-1], num_dims(op, codec, codes.shape[-1])
    new_codes, new_scales = encode(op, new, codec)
    if cached != h or new_scales.shape[-1] != scales.shape[-1]:
        raise TypeError(
            f"{op}: `new` has {h} dims and {new_scales.shape[-1]} scales, the cache "
            f"{cached} and {scales.shape[-1]}."
        )
    return (
        update_kv_cache_reference(codes, new_codes, *slots, ring=ring),
        update_kv_cache_reference(scales, new_scales, *slots, ring=ring),
    )


def update_quantized_kv_cache_bwd_reference(
    codes: UInt8[Array, "b s k code_bytes"],
    scales: Float[Array, "b s k groups"],
    new: Float[Array, "b t k h"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None,
    dscales: Float[Array, "b s k groups"],
    *,
    codec: VectorCodec,
    ring: bool,
) -> tuple[Float[Array, "b s k groups"], Float[Array, "b t k h"]]:
    def updated_scales(scales, new):
        return update_quantized_kv_cache_reference(
            codes, scales, new, positions, new_lengths, codec=codec, ring=ring
        )[1]

    return jax.vjp(updated_scales, scales, new)[1](dscales)


update_quantized_kv_cache_p = kernel_primitive(
    update_quantized_kv_cache_reference,
    bwd=update_quantized_kv_cache_bwd_reference,
    # a token's slot may be on any device; a vector is quantised whole
    replicated=("s", "t", "h", "code_bytes", "groups"),
)
