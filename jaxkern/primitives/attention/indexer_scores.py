"""The lightning indexer of DeepSeek V3.2: which keys a query is to attend to.

Small heads rate every key, `select_keys` takes the best, `sparse_attention` reads them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkern.primitives.attention.attend import heads_outside, kept, products
from jaxkern.primitives.attention.by_rows import first_positions
from jaxkern.primitives.attention.mask import (
    checked_visibility,
    make_mask,
    padding_mask,
)
from jaxkern.primitives.attention.query_blocks import rows_at_once
from jaxkern.primitives.attention.selection import check_block_size, num_blocks
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive

POOLS = ("max", "mean")


@check_arguments
def indexer_scores(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s h"],
    weights: Float[Array, "b t n"],
    *,
    kv_lengths: Int[Array, " b"] | None = None,
    q_offset: int | Int[Array, " b"] | None = None,
    causal: bool = False,
    block_size: int = 1,
    pool: str = "max",
) -> Float[Array, "b t blocks"]:
    """How much each query is interested in each key, or in each block of keys.

        score[i, j] = sum_n weights[i, n] * relu(query[i, n] . key[j])

    the index score of DeepSeek V3.2 with n heads and one key for all of them. A hidden
    key has -inf; what is visible is as in `attention`. With block_size > 1 the score of
    block c is the maximum or the mean over its visible keys, those of
    c * block_size ... (c + 1) * block_size - 1; -inf where it has none.

    Products and sums are float32 (float64 for float64 operands). A positive factor
    changes no choice: DeepSeek's n**-0.5 * h**-0.5 belongs into `weights`, where they
    are trained. What lies behind `kv_lengths` has no influence, be it NaN. The plain
    lowering holds at most about 256 MB of products at once.

    Args:
      query: `[b, t, n, h]`, any float dtype, already rotated.
      key: `[b, s, h]`, the cache of index keys.
      weights: `[b, t, n]` of the heads, of either sign.
      kv_lengths: `[b]` int, the keys that each cache has, may be traced.
      q_offset: position of query row 0 among the keys, a number or `[b]`, may be
        traced. Default s - t. Only read with causal.
      causal: queries see no key after their own position.
      block_size: keys of a block, 1 or more.
      pool: "max" or "mean", the score of a block of more than one key.

    Returns:
      `[b, t, ceil(s / block_size)]`, float32.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: an option out of range, or an ambiguous position of the queries.

    Example:
      >>> key = jnp.array([[[1.0], [3.0], [-2.0], [5.0]]])  # [b, s, h]
      >>> query, weights = jnp.ones((1, 1, 2, 1)), jnp.array([[[1.0, 0.5]]])
      >>> lengths = jnp.array([3])
      >>> jaxkern.indexer_scores(query, key, weights, kv_lengths=lengths)
      Array([[[ 1.5,  4.5,  0. , -inf]]], dtype=float32)
      >>> jaxkern.indexer_scores(query, key, weights, block_size=2)
      Array([[[4.5, 7.5]]], dtype=float32)
    """
    op = "indexer_scores"
    for name, x, ndim in (("query", query, 4), ("key", key, 3)):
        if x.ndim != ndim:
            raise TypeError(f"{op}: `{name}` must have {ndim} dims, got {x.shape}.")
    check_block_size(op, block_size)
    if pool not in POOLS:
        raise ValueError(f"{op}: `pool` must be one of {POOLS}, got {pool!r}.")
    b, t = query.shape[:2]
    causal, _, q_offset = checked_visibility(
        op, causal, None, None, q_offset, kv_lengths, t, key.shape[1]
    )
    return indexer_scores_p(
        query,
        key,
        weights,
        per_sequence(op, "kv_lengths", kv_lengths, (b,)),
        per_sequence(op, "q_offset", q_offset, (b,)),
        causal=causal,
        block_size=block_size,
        pool=pool,
    )


def indexer_scores_reference(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s h"],
    weights: Float[Array, "b t n"],
    kv_lengths: Int[Array, " b"] | None,
    q_offset: Int[Array, " b"] | None,
    *,
    causal: bool,
    block_size: int,
    pool: str,
) -> Float[Array, "b t blocks"]:
    first = first_positions(q_offset, query, key)

    def of_rows(query, weights, at):
        visible = visible_keys(query, key, kv_lengths, at if causal else None)
        scores = key_scores(query, key, weights, kv_lengths)
        return by_block(jnp.where(visible, scores, -jnp.inf), block_size, pool)

    block = rows_at_once(query, key)
    if block >= query.shape[1]:
        return of_rows(query, weights, first)

    def of_row(row):
        i, query, weights = row
        return of_rows(query[:, None], weights[:, None], first + i)[:, 0]

    rows = (jnp.moveaxis(x, 1, 0) for x in (query, weights))
    parts = lax.map(of_row, (jnp.arange(query.shape[1]), *rows), batch_size=block)
    return jnp.moveaxis(parts, 0, 1)


def key_scores(query, key, weights, kv_lengths) -> Float[Array, "b t s"]:
    """Of every key, 0 behind the lengths."""
    key = key[:, :, None]  # one head
    q = heads_outside(query, key)
    if kv_lengths is None:
        z = products(q, key)
    else:
        z = kept(q, key, padding_mask(kv_lengths, key.shape[1]))
    weights = jnp.swapaxes(at_least_f32(weights), 1, 2)[..., None]  # [b n t 1]
    return jnp.sum(weights * jax.nn.relu(z[:, 0]), axis=1)  # z is [b 1 n t s]


def visible_keys(query, key, kv_lengths, q_offset) -> Bool[Array, "#b #t s"]:
    """By the lengths, and by the positions of causal queries."""
    t, s = query.shape[1], key.shape[1]
    visible = jnp.ones((1, 1, s), bool)
    if kv_lengths is not None:
        visible = padding_mask(kv_lengths, s)[:, 0]
    if q_offset is not None:
        visible &= make_mask(t, s, causal=True, q_offset=q_offset)[:, 0]
    return visible


def by_block(
    scores: Float[Array, "b t s"], block_size: int, pool: str
) -> Float[Array, "b t blocks"]:
    if block_size == 1:
        return scores
    b, t, s = scores.shape
    blocks = num_blocks(s, block_size)
    behind = [(0, 0), (0, 0), (0, blocks * block_size - s)]
    scores = jnp.pad(scores, behind, constant_values=-jnp.inf)
    scores = scores.reshape(b, t, blocks, block_size)
    if pool == "max":
        return jnp.max(scores, axis=-1)
    seen = scores != -jnp.inf
    count = jnp.sum(seen, axis=-1)
    total = jnp.sum(jnp.where(seen, scores, 0), axis=-1)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), -jnp.inf)


indexer_scores_p = kernel_primitive(
    indexer_scores_reference,
    # the position of a row counts from t and s, a block has several keys; and a relu is
    # of a whole product
    replicated=("t", "s", "h"),
)
