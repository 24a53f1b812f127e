"""Key/value cache: writes the t new tokens of each sequence to its slots.

cache[b, positions[b] + i] = new[b, i]      (ring: slot modulo s)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.kernel_primitive import kernel_primitive


def update_kv_cache(
    cache: Float[Array, "b s k h"],
    new: Float[Array, "b t k h"],
    positions: Int[Array, " b"],
    *,
    ring: bool = False,
) -> Float[Array, "b s k h"]:
    """The cache with new tokens at their slots; call it for keys and for values.

        cache[b, positions[b] + i] = new[b, i]                   for i = 0 ... t-1

    A token whose slot is not in 0 ... s-1 is dropped, unlike in
    `lax.dynamic_update_slice`, which shifts all tokens until the last one fits. As a
    ring the slot is (positions[b] + i) mod s and the last s tokens stay.

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
      ring: slots are taken modulo s.

    Returns:
      `[b, s, k, h]`, dtype of cache.
    """
    positions = jnp.broadcast_to(positions, cache.shape[:1])
    return update_kv_cache_p(cache, new, positions, ring=ring)


def ring_positions(lengths: Int[Array, "..."], slots: int) -> Int[Array, "... s"]:
    """Position of the token in each slot of a ring, negative for an empty slot.

        p_j = the largest p < length with p mod s = j

    After `lengths` tokens. A query at position q with a window of W sees slot j where
    p_j >= 0 and q - W < p_j <= q: that is attention's `mask`.

    Args:
      lengths: `[...]` int, tokens written so far, may be traced.
      slots: s, the size of the ring.

    Returns:
      `[..., s]` int.
    """
    last = jnp.asarray(lengths)[..., None] - 1
    return last - (last - jnp.arange(slots)) % max(slots, 1)


def update_kv_cache_reference(
    cache: Float[Array, "b s k h"],
    new: Float[Array, "b t k h"],
    positions: Int[Array, " b"],
    *,
    ring: bool,
) -> Float[Array, "b s k h"]:
    s, t = cache.shape[1], new.shape[1]
    new = new.astype(cache.dtype)
    if not ring:
        return write(cache, new, positions)
    if t > s:  # the last s tokens stay
        new, positions, t = new[:, t - s :], positions + (t - s), s
    slots = positions % max(s, 1)
    cache = write(cache, new, slots)
    return cache if t <= 1 else write(cache, new, slots - s)  # what went round the end


def write(cache, new, positions):
    """Writes new[b] at positions[b]; what falls outside is dropped."""
    s, t = cache.shape[1], new.shape[1]
    size = min(s, t)

    def write_one(cache, new, position):
        # the window of `size` slots that holds every token that is inside
        start = jnp.clip(position, 0, s - size)
        token = start - position + jnp.arange(size)  # the one each slot gets
        inside = (0 <= token) & (token < t)
        rows = jnp.take(new, token, axis=0, mode="clip")
        old = lax.dynamic_slice_in_dim(cache, start, size)
        rows = jnp.where(inside[:, None, None], rows, old)
        return lax.dynamic_update_slice_in_dim(cache, rows, start, axis=0)

    if size == 0:
        return cache
    if cache.shape[0] == 1:  # one dynamic_update_slice; vmap would make it a scatter
        return write_one(cache[0], new[0], positions[0])[None]
    return jax.vmap(write_one)(cache, new, positions)


update_kv_cache_p = kernel_primitive(
    update_kv_cache_reference,
    replicated=("s", "t"),  # a token's slot may be on any device
)
