"""Paged key/value cache: writes new tokens to pages that the sequences share.

pages[slots[b, i] // page, slots[b, i] % page] = new[b, i]

Pages as in https://arxiv.org/abs/2309.06180.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def update_paged_kv_cache(
    pages: Float[Array, "num_pages page k h"],
    new: Float[Array, "b t k h"],
    slots: Int[Array, "b t"],
) -> Float[Array, "num_pages page k h"]:
    """The pages with new tokens in their slots; call it for keys and for values.

        pages[slots[b, i] // page, slots[b, i] % page] = new[b, i]

    A token whose slot is not in 0 ... num_pages * page - 1 is dropped. Of two tokens
    with one slot either may stay: `page_slots` gives such slots only to sequences that
    share a page, which must not write to it.

    Linear in pages and new. Donate the pages to `jit`: they are written in place.

    Args:
      pages: `[num_pages, page, k, h]`.
      new: `[b, t, k, h]`, converted to pages.dtype.
      slots: `[b, t]` int, of `page_slots`: one array for all layers, keys and values.

    Returns:
      `[num_pages, page, k, h]`, dtype of pages.

    Raises:
      TypeError: shapes or dtypes do not fit.

    Example:
      >>> pages, new = jnp.zeros((2, 2, 1, 1)), jnp.ones((1, 3, 1, 1))
      >>> slots = jaxkern.page_slots(jnp.array([[1, 0]]), jnp.array([0]), 3, 2)
      >>> jaxkern.update_paged_kv_cache(pages, new, slots)[:, :, 0, 0]
      Array([[1., 0.],
             [1., 1.]], dtype=float32)
    """
    return update_paged_kv_cache_p(pages, new.astype(pages.dtype), slots)


@check_arguments
def page_slots(
    block_tables: Int[Array, "b pages"],
    positions: Int[Array, " b"],
    t: int,
    page_size: int,
    new_lengths: Int[Array, " b"] | None = None,
) -> Int32[Array, "b t"]:
    """Where the next t tokens of each sequence are in the pages.

        slot = block_tables[b, p // page_size] * page_size + p % page_size
        p = positions[b] + i

    Args:
      block_tables: `[b, pages]` int, the page that holds tokens m * page_size ... of
        the sequence in column m, negative where it has none.
      positions: `[b]` int, position of the first new token, may be traced.
      t: number of new tokens.
      page_size: tokens in a page.
      new_lengths: `[b]` int, how many of the t tokens count. Default t.

    Returns:
      int32 `[b, t]`, -1 for a token without a page or that does not count.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> tables = jnp.array([[1, 0], [2, -1]])  # pages of two sequences
      >>> jaxkern.page_slots(tables, jnp.array([1, 1]), 2, page_size=2)
      Array([[ 3,  0],
             [ 5, -1]], dtype=int32)
    """
    p = positions[:, None] + jnp.arange(t)
    if block_tables.shape[1] == 0:
        return jnp.full(p.shape, -1, jnp.int32)
    column = p // page_size
    numbers = jnp.take_along_axis(block_tables, column, axis=1, mode="clip")
    counts = (p >= 0) & (column < block_tables.shape[1]) & (numbers >= 0)
    counts &= numbers < (2**31 - 1) // page_size  # else its slots would wrap round
    if new_lengths is not None:
        counts &= jnp.arange(t) < new_lengths[:, None]
    slots = numbers * page_size + p % page_size
    return jnp.where(counts, slots, -1).astype(jnp.int32)


@check_arguments
def gather_pages(
    pages: Float[Array, "num_pages page k h"], block_tables: Int[Array, "b pages"]
) -> Float[Array, "b s k h"]:
    """The pages of each sequence one after the other, as a linear cache has them.

        out[b, i * page + j] = pages[block_tables[b, i], j]

    Args:
      pages: `[num_pages, page, k, h]`.
      block_tables: `[b, pages]` int. A number outside 0 ... num_pages - 1 gives zeros.

    Returns:
      `[b, pages * page, k, h]`.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> pages = jnp.arange(4.0).reshape(2, 2, 1, 1)
      >>> jaxkern.gather_pages(pages, jnp.array([[1, 0]]))[:, :, 0, 0]
      Array([[2., 3., 0., 1.]], dtype=float32)
    """
    n, page, k, h = pages.shape
    b, m = block_tables.shape
    if n == 0:
        return jnp.zeros((b, m * page, k, h), pages.dtype)
    spec = jax.typeof(pages).sharding.spec
    rows = pages.at[jnp.clip(block_tables, 0, n - 1)].get(
        mode="promise_in_bounds",
        out_sharding=explicit_spec(*jax.typeof(block_tables).sharding.spec, *spec[1:]),
    )
    exists = page_exists(block_tables, n)[:, :, None, None, None]
    return jnp.where(exists, rows, 0).reshape(b, m * page, k, h)


def scatter_pages(
    rows: Float[Array, "b s k h"],
    block_tables: Int[Array, "b pages"],
    pages: Float[Array, "num_pages page k h"],
) -> Float[Array, "num_pages page k h"]:
    """The transpose of `gather_pages`: sums rows by page, in the shape of pages."""
    n, page, k, h = pages.shape
    b, m = block_tables.shape
    zeros = jnp.zeros_like(pages, rows.dtype)
    if n == 0:
        return zeros
    exists = page_exists(block_tables, n)[:, :, None, None, None]
    return zeros.at[jnp.clip(block_tables, 0, n - 1)].add(
        jnp.where(exists, rows.reshape(b, m, page, k, h), 0),
        mode="promise_in_bounds",
        out_sharding=explicit_spec(*jax.typeof(pages).sharding.spec),
    )


def page_exists(
    block_tables: Int[Array, "b pages"], num_pages: int
) -> Bool[Array, "b pages"]:
    return (block_tables >= 0) & (block_tables < num_pages)


def explicit_spec(*cuts) -> P | None:
    """How a result is cut where types say so: JAX asks for it, and only there."""
    return P(*cuts) if jax.sharding.get_abstract_mesh().explicit_axes else None


def update_paged_kv_cache_reference(
    pages: Float[Array, "num_pages page k h"],
    new: Float[Array, "b t k h"],
    slots: Int[Array, "b t"],
) -> Float[Array, "num_pages page k h"]:
    return pages.at[inside(slots, pages)].set(
        new, mode="drop", out_sharding=explicit_spec(*jax.typeof(pages).sharding.spec)
    )


def update_paged_kv_cache_bwd_reference(
    slots: Int[Array, "b t"], dout: Float[Array, "num_pages page k h"]
) -> tuple[Float[Array, "num_pages page k h"], Float[Array, "b t k h"]]:
    """Each slot's gradient goes to the token that was written there, if any was."""
    at, spec = inside(slots, dout), jax.typeof(dout).sharding.spec
    dpages = dout.at[at].set(0, mode="drop", out_sharding=explicit_spec(*spec))
    dnew = dout.at[at].get(
        mode="fill",
        fill_value=0,
        out_sharding=explicit_spec(*jax.typeof(slots).sharding.spec, *spec[2:]),
    )
    return dpages, dnew


def inside(slots, pages):
    """(page, row) of each slot; outside of all pages where there is no such slot."""
    n, page = pages.shape[:2]
    exists = (slots >= 0) & (slots < n * page)
    slots = jnp.where(exists, slots, n * page)
    return slots // max(page, 1), slots % max(page, 1)


update_paged_kv_cache_p = kernel_primitive(
    update_paged_kv_cache_reference,
    bwd=update_paged_kv_cache_bwd_reference,
    linear=("pages", "new"),
    replicated=("num_pages", "page", "b", "t"),  # a token's slot may be on any device
)
