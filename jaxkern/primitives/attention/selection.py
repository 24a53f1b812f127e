"""Keys that indices name, one by one or in blocks: as a mask, or as rows to gather."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkern.primitives.index.rows import in_one_piece


def check_block_size(op: str, block_size: int) -> None:
    if block_size < 1:
        raise ValueError(
            f"{op}: block_size is {block_size}. It counts keys: from 1 on."
        )


def num_blocks(s: int, block_size: int) -> int:
    """Of s keys; the last block may be short."""
    return -(-s // block_size)


def selection_mask(
    indices: Int[Array, "b t lists selected"], s: int, block_size: int
) -> Bool[Array, "b lists t s"]:
    """Whether the indices of a query name each of s keys."""
    blocks = num_blocks(s, block_size)
    outside = (indices < 0) | (indices >= blocks)
    at = jnp.where(outside, blocks, indices)  # which is dropped

    @jax.vmap
    @jax.vmap
    @jax.vmap
    def named(at):
        return jnp.zeros(blocks, bool).at[at].set(True, mode="drop")

    keys = jnp.repeat(named(at), block_size, axis=-1)[..., :s]
    return jnp.swapaxes(keys, 1, 2)


def for_each_head(
    mask: Bool[Array, "b lists t s"], n: int
) -> Bool[Array, "b heads t s"]:
    """A mask of each key head for n query heads; one for all of them stays one."""
    b, k, t, s = mask.shape
    if k == 1:
        return mask
    every = jnp.broadcast_to(mask[:, :, None], (b, k, n // max(k, 1), t, s))
    return every.reshape(b, n, t, s)


def selected_rows(
    indices: Int[Array, "b t lists selected"], s: int, block_size: int
) -> tuple[Int[Array, "b t lists rows"], Bool[Array, "b t lists rows"]]:
    """Numbers of keys, within the s that there are, and which of them are named."""
    blocks = num_blocks(s, block_size)
    named = (indices >= 0) & (indices < blocks)
    first = jnp.clip(indices, 0, max(blocks - 1, 0)) * block_size
    at = first[..., None] + jnp.arange(block_size)
    named = named[..., None] & (at < s)
    rows = *indices.shape[:3], indices.shape[3] * block_size
    return jnp.clip(at, 0, max(s - 1, 0)).reshape(rows), named.reshape(rows)


def without_repeats(
    indices: Int[Array, "b t lists selected"],
) -> Int[Array, "b t lists selected"]:
    """-1 in the place of a number that stands before it already."""
    whole = in_one_piece(indices, -1)
    place = jnp.arange(whole.shape[-1])
    before = place < place[:, None]
    repeated = (whole[..., None, :] == whole[..., :, None]) & before
    return jnp.where(jnp.any(repeated, axis=-1), -1, whole)


def taken(
    x: Float[Array, "b s k d"],
    at: Int[Array, "b t lists rows"],
    visible: Bool[Array, "b t lists rows"],
) -> Float[Array, "b*t rows k d"]:
    """Rows of x by their numbers, 0 where hidden."""
    b, s, k, d = x.shape
    _, t, lists, rows = at.shape

    def of_one_list(x, at, visible):  # [s, k or 1, d], [t, rows] twice
        x = x.at[at].get(mode="promise_in_bounds")
        return jnp.where(visible[..., None, None], x, 0)

    of_each = jax.vmap(jax.vmap(of_one_list, 1, 2))
    picked = of_each(x.reshape(b, s, lists, k // max(lists, 1), d), at, visible)
    return picked.reshape(b * t, rows, k, d)
