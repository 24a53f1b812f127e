"""A paged key/value cache as a pytree: the sequences take pages as they grow."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kv_cache.update_paged_kv_cache import (
    page_slots,
    update_paged_kv_cache,
)

NO_PAGE = -1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_pages", "value_pages", "block_tables", "lengths"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of b sequences in pages; `cached_attention` uses it.

    The token at position p is in row p % page of page block_tables[b, p // page].
    Tokens for which there is no page, because none is left or the table is full, are
    dropped: no query sees them. Positions go on.

    Attributes:
      key_pages: `[num_pages, page, k, h]`.
      value_pages: `[num_pages, page, k, hv]`.
      block_tables: `[b, pages]` int32, the pages of each sequence, -1 for none.
      lengths: `[b]` int32, tokens that each sequence has had.

    Example:
      >>> cache = jaxkern.empty_paged_kv_cache(2, 4, 5, 2, 1, 4)
      >>> new = jnp.ones((2, 3, 1, 4))
      >>> cache = jaxkern.append_paged_kv_cache(cache, new, new, jnp.array([3, 1]))
      >>> isinstance(cache, jaxkern.PagedKVCache)
      True
      >>> cache.lengths, cache.block_tables  # two pages, one page, of five
      (Array([3, 1], dtype=int32), Array([[ 0,  1, -1, -1],
             [ 2, -1, -1, -1]], dtype=int32))
    """

    key_pages: Float[Array, "num_pages page k h"]
    value_pages: Float[Array, "num_pages page k hv"]
    block_tables: Int32[Array, "b pages"]
    lengths: Int32[Array, " b"]

    @property
    def page_size(self) -> int:
        return self.key_pages.shape[1]


@check_arguments
def empty_paged_kv_cache(
    batch: int,
    pages: int,
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: Any = jnp.bfloat16,
) -> PagedKVCache:
    """A cache of one layer without tokens, all pages free.

    Args:
      batch: b sequences.
      pages: the most pages of one sequence: its longest text is pages * page_size.
      num_pages: pages of all sequences together; fewer than b * pages is the point.
      page_size, kv_heads, head_dim: page, k, h.
      value_dim: hv, default h.
      dtype: of keys and values.

    Returns:
      A `PagedKVCache` of zeros, its tables without pages and its lengths 0.

    Raises:
      TypeError: a size is not of its kind.

    Example:
      >>> cache = jaxkern.empty_paged_kv_cache(2, 4, 5, 2, 1, 4)
      >>> cache.key_pages.shape, cache.block_tables.shape
      ((5, 2, 1, 4), (2, 4))
    """
    value_dim = head_dim if value_dim is None else value_dim
    return PagedKVCache(
        jnp.zeros((num_pages, page_size, kv_heads, head_dim), dtype),
        jnp.zeros((num_pages, page_size, kv_heads, value_dim), dtype),
        jnp.full((batch, pages), NO_PAGE, jnp.int32),
        jnp.zeros(batch, jnp.int32),
    )


@check_arguments
def append_paged_kv_cache(
    cache: PagedKVCache,
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k hv"],
    new_lengths: Int[Array, " b"] | None = None,
) -> PagedKVCache:
    """The cache with the next t tokens of each sequence; donate it to `jit`.

    Takes free pages where they are needed. A page that several sequences share, a
    common prompt, must be full: else they would write over each other's tokens.

    Args:
      cache: of `empty_paged_kv_cache`, or returned by an earlier call.
      key, value: `[b, t, k, h]` and `[b, t, k, hv]`, converted to the cache's dtype.
      new_lengths: `[b]` int in 0 ... t, how many of the t tokens count, default all.

    Returns:
      The cache with the tokens and the pages that they begin, its lengths grown by
        the tokens that count.

    Raises:
      TypeError: `cache` is no PagedKVCache, or shapes or dtypes do not fit.

    Example:
      >>> cache = jaxkern.empty_paged_kv_cache(2, 4, 5, 2, 1, 4)
      >>> new = jnp.ones((2, 3, 1, 4))
      >>> cache = jaxkern.append_paged_kv_cache(cache, new, new)
      >>> cache.lengths, cache.block_tables
      (Array([3, 3], dtype=int32), Array([[ 0,  1, -1, -1],
             [ 2,  3, -1, -1]], dtype=int32))
    """
    t = key.shape[1]
    new = t if new_lengths is None else new_lengths.astype(jnp.int32)
    lengths, page_size = cache.lengths + new, cache.page_size
    tables = allocate_pages(
        cache.block_tables,
        cache.lengths,
        lengths,
        num_pages=cache.key_pages.shape[0],
        page_size=page_size,
    )
    slots = page_slots(tables, cache.lengths, t, page_size, new_lengths)
    return PagedKVCache(
        update_paged_kv_cache(cache.key_pages, key, slots),
        update_paged_kv_cache(cache.value_pages, value, slots),
        tables,
        lengths,
    )


@check_arguments
def allocate_pages(
    block_tables: Int[Array, "b pages"],
    lengths: Int[Array, " b"],
    new_lengths: Int[Array, " b"],
    *,
    num_pages: int,
    page_size: int,
) -> Int[Array, "b pages"]:
    """Tables with a free page for every page that a sequence begins.

    A sequence that grows from lengths[b] to new_lengths[b] tokens begins the pages in
    between. A page is free if no table has it; the lowest number comes first, sequence
    by sequence. Where none is left the entry stays -1, also later: a page never begins
    in its middle, so no sequence sees what another has left in it.

    Args:
      block_tables: `[b, pages]` int, negative for no page.
      lengths, new_lengths: `[b]` int, tokens before and after.
      num_pages, page_size: how many pages there are, and tokens in one.

    Returns:
      `[b, pages]`, dtype of block_tables, at least int32: the tables with the new
      pages.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> tables, none = jnp.full((2, 3), -1), jnp.array([0, 0])
      >>> lengths = jnp.array([3, 1])
      >>> jaxkern.allocate_pages(tables, none, lengths, num_pages=4, page_size=2)
      Array([[ 0,  1, -1],
             [ 2, -1, -1]], dtype=int32)
    """
    first_token = page_size * jnp.arange(block_tables.shape[1])
    begins = (first_token >= lengths[:, None]) & (first_token < new_lengths[:, None])
    missing = begins & (block_tables < 0)
    numbers = jnp.where(block_tables < 0, num_pages, block_tables)
    taken = jnp.zeros(num_pages, bool).at[numbers].set(True, mode="drop")
    free_first = jnp.argsort(taken, stable=True).astype(block_tables.dtype)
    turn = jnp.cumsum(missing).reshape(missing.shape) - 1  # whose turn it is
    given = missing & (turn < num_pages - jnp.sum(taken))
    pages = free_first.at[turn].get(mode="fill", fill_value=NO_PAGE)
    return jnp.where(given, pages, block_tables)


@check_arguments
def release_pages(cache: PagedKVCache, finished: Bool[Array, " b"]) -> PagedKVCache:
    """The cache where the finished sequences are empty and their pages free again.

    A page that another sequence shares stays taken. To move or share pages write the
    tables: they are plain arrays.

    Args:
      cache: of `empty_paged_kv_cache`, or returned by a later call.
      finished: `[b]` bool.

    Returns:
      The cache with lengths of 0 and no pages where `finished`.

    Raises:
      TypeError: `cache` is no PagedKVCache, or finished is no array.

    Example:
      >>> cache = jaxkern.empty_paged_kv_cache(2, 4, 5, 2, 1, 4)
      >>> new = jnp.ones((2, 3, 1, 4))
      >>> cache = jaxkern.append_paged_kv_cache(cache, new, new)
      >>> cache = jaxkern.release_pages(cache, jnp.array([True, False]))
      >>> cache.lengths, cache.block_tables
      (Array([0, 3], dtype=int32), Array([[-1, -1, -1, -1],
             [ 2,  3, -1, -1]], dtype=int32))
    """
    tables = jnp.where(finished[:, None], NO_PAGE, cache.block_tables)
    lengths = jnp.where(finished, 0, cache.lengths)
    return dataclasses.replace(cache, block_tables=tables, lengths=lengths)
