"""Which blocks of pairs are visible, and where XLA is faster by how much is.

For the kernels of attention of many queries, in both backends.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.precision import one_product

# {up to this head dim: the largest share of visible pairs at which these kernels are
# faster in float32}: XLA computes all pairs, these kernels the visible ones. First
# where float32 is multiplied as TF32, then where by three such products.
MAX_SHARE = {
    "forward": ({256: 1.0}, {128: 1.0, 256: 0.9}),
    "backward": ({128: 1.0, 256: 0.45}, {64: 1.0, 128: 0.7, 256: 0.3}),
}
EDGE = 64  # queries and keys of a block
SHORT = 128  # so few queries have too few tiles for gradients of heads above 64
FEW_SCORES = 2**17  # up to here a tile waits longer than all of XLA's launches take
FEW_QUERIES = 8  # up to here reading the keys takes the time, not the arithmetic


def slower(query: Any, key: Any, value: Any, **rest: Any) -> str | None:
    b, t, n, h = query.shape
    scores = b * t * n * key.shape[1]
    if scores <= FEW_SCORES:
        return f"{scores} scores are few"
    if query.dtype != jnp.float32:
        return None
    hv = value.shape[3]
    which = "backward" if "dout" in rest else "forward"
    if which == "backward" and t <= SHORT and max(h, hv) > 64:
        return f"gradients of {t} queries in float32 at head dims of {h} and {hv}"
    by_width = MAX_SHARE[which][0 if one_product(query.dtype) else 1]
    largest = next((x for up_to, x in by_width.items() if max(h, hv) <= up_to), 0.0)
    share = share_seen(t, key.shape[1], **rest)
    if share <= largest:
        return None
    return f"float32 at head dims of {h} and {hv} with {share:.0%} of the pairs seen"


def share_seen(
    t: int, s: int, causal: bool, window: int | None, q_segment_ids: Any, **_: Any
) -> float:
    """The share of pairs in blocks of which some pair is visible, by shapes alone."""
    share = min(max(1 - (t - EDGE) / (2 * s), 0.5), 1.0) if causal else 1.0
    if window is not None:
        share = min(share, (window + EDGE) / s + (0.0 if causal else 0.5))
    return share if q_segment_ids is None else share / 2  # there are several


def segment_bounds(
    row_ids: jax.Array, column_ids: jax.Array, block_rows: int, block_columns: int
) -> jax.Array:
    """[b, blocks of rows, 4]: the blocks of columns that `ranges` is to keep.

    Ids of packed sequences ascend, so that few blocks are kept; others work too.
    """

    def extremes(ids, block):
        short = -ids.shape[1] % block
        blocks = jnp.pad(ids, ((0, 0), (0, short)), mode="edge")
        blocks = blocks.reshape(ids.shape[0], -1, block)
        return blocks.min(-1), blocks.max(-1)

    low, high = (x[:, :, None] for x in extremes(row_ids, block_rows))
    from_low, from_high = (x[:, None] for x in extremes(column_ids, block_columns))
    meet = (low <= from_high) & (from_low <= high)
    return block_ranges(meet, (low == from_high) & (from_low == high))


def block_ranges(meet: jax.Array, same: jax.Array) -> jax.Array:
    """[b, rows, 4] of [b, rows, columns]: [first, last) holds all that meet.

    Of these all of [whole, whole_end) are the same.
    """
    at = jnp.arange(meet.shape[2], dtype=jnp.int32)
    blocks = jnp.int32(meet.shape[2])
    first = jnp.min(jnp.where(meet, at, blocks), -1)
    last = jnp.max(jnp.where(meet, at + 1, 0), -1)
    whole = jnp.min(jnp.where(same, at, blocks), -1)
    behind = ~same & (at >= whole[..., None])
    whole_end = jnp.min(jnp.where(behind, at, blocks), -1)
    return jnp.stack([first, whole, whole_end, last], -1)
