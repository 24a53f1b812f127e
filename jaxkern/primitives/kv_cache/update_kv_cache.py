"""Key/value cache: writes the t new tokens of each sequence to its slots.

cache[b, positions[b] + i] = new[b, i]      (ring: slot modulo s)
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def update_kv_cache(
    cache: Float[Array, "b s k h"],
    new: Float[Array, "b t k h"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None = None,
    *,
    ring: bool = False,
) -> Float[Array, "b s k h"]:
    """The cache with new tokens at their slots; call it for keys and for values.

        cache[b, positions[b] + i] = new[b, i]      for i = 0 ... new_lengths[b] - 1

    A token whose slot is not in 0 ... s-1 is dropped, unlike in
    `lax.dynamic_update_slice`, which shifts all tokens until the last one fits. As a
    ring the slot is (positions[b] + i) mod s and the last s tokens stay, also of more
    than s new ones.

    Donate the cache to `jit`: it is then written in place, t rows of each sequence, and
    nothing else is read.

    A ring of s slots is a sliding window of s keys. One query at a time needs no order:
    after the update at position p, `attention(..., kv_lengths=min(p + 1, s))` without
    causal and window. For anything else `ring_positions` says which token each slot
    holds. Several new tokens overwrite keys that the first of them may still see:
    attend over the old ring and the new keys together, then update.

    Args:
      cache: `[b, s, k, h]`, s slots.
      new: `[b, t, k, h]`, converted to cache.dtype.
      positions: `[b]` int, position of new[:, 0] in each sequence, may be traced. A
        number counts for all.
      new_lengths: `[b]` int, how many of the t tokens count, may be traced; what is
        behind them is padding and not written. Default t.
      ring: slots are taken modulo s.

    Returns:
      `[b, s, k, h]`, dtype of cache.

    Raises:
      TypeError: shapes or dtypes do not fit, or positions are for another number of
        sequences.
      ValueError: a position does not fit in int32.

    Example:
      >>> cache, new = jnp.zeros((2, 3, 1, 1)), jnp.ones((2, 2, 1, 1))
      >>> jaxkern.update_kv_cache(cache, new, jnp.array([0, 2]))[:, :, 0, 0]
      Array([[1., 1., 0.],
             [0., 0., 1.]], dtype=float32)
      >>> jaxkern.update_kv_cache(cache, new, jnp.array([0, 2]), ring=True)[:, :, 0, 0]
      Array([[1., 1., 0.],
             [1., 0., 1.]], dtype=float32)
    """
    start = per_sequence("update_kv_cache", "positions", positions, cache.shape[:1])
    return update_kv_cache_p(cache, new, start, new_lengths, ring=ring)


@check_arguments
def ring_positions(lengths: Int[Array, "..."], slots: int) -> Int[Array, "... s"]:
    """Position of the token in each slot of a ring, negative for an empty slot.

        p_j = the largest p < length with p mod s = j

    After `lengths` tokens. A query at position q with a window of W sees slot j where
    p_j >= 0 and q - W < p_j <= q: that is attention's `mask`.

    Args:
      lengths: `[...]` int, tokens written so far, may be traced.
      slots: s, the size of the ring.

    Returns:
      `[..., s]` int32.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> jaxkern.ring_positions(jnp.array([2, 6]), 4)  # after 2 and after 6 tokens
      Array([[ 0,  1, -2, -1],
             [ 4,  5,  2,  3]], dtype=int32)
    """
    last = jnp.asarray(lengths, jnp.int32)[..., None] - 1
    return last - (last - jnp.arange(slots, dtype=jnp.int32)) % max(slots, 1)


def update_kv_cache_reference(
    cache: Float[Array, "b s k h"],
    new: Float[Array, "b t k h"],
    positions: Int[Array, " b"],
    new_lengths: Int[Array, " b"] | None,
    *,
    ring: bool,
) -> Float[Array, "b s k h"]:
    s, t = cache.shape[1], new.shape[1]
    new = new.astype(cache.dtype)
    lengths = jnp.full_like(positions, t) if new_lengths is None else new_lengths
    if not ring:
        return write(cache, new, positions, lengths)
    if t > s:  # the last s tokens stay
        first = jnp.clip(lengths - s, 0, t - s)
        last_s = functools.partial(lax.dynamic_slice_in_dim, slice_size=s)
        new = jax.vmap(last_s)(new, first)
        positions, lengths, t = positions + first, lengths - first, s
    slots = positions % max(s, 1)
    cache = write(cache, new, slots, lengths)
    if t <= 1:
        return cache
    return write(cache, new, slots - s, lengths)  # what went round the end


def write(cache, new, positions, lengths):
    """Writes new[b, :lengths[b]] at positions[b]; what falls outside is dropped."""
    s, t = cache.shape[1], new.shape[1]
    size = min(s, t)

    def write_one(cache, new, position, length):
        # the window of `size` slots that holds every token that is inside
        start = jnp.clip(position, 0, s - size)
        token = start - position + jnp.arange(size)  # the one each slot gets
        inside = (0 <= token) & (token < jnp.minimum(length, t))
        rows = jnp.take(new, token, axis=0, mode="clip")
        old = lax.dynamic_slice_in_dim(cache, start, size)
        rows = jnp.where(inside[:, None, None], rows, old)
        return lax.dynamic_update_slice_in_dim(cache, rows, start, axis=0)

    if size == 0:
        return cache
    if cache.shape[0] == 1:  # one dynamic_update_slice; vmap would make it a scatter
        return write_one(cache[0], new[0], positions[0], lengths[0])[None]
    return jax.vmap(write_one)(cache, new, positions, lengths)


update_kv_cache_p = kernel_primitive(
    update_kv_cache_reference,
    replicated=("s", "t"),  # a token's slot may be on any device
)
