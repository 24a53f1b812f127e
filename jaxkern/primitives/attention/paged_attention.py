"""Attention over a paged key/value cache  (https://arxiv.org/abs/2309.06180)."""

from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.attention.attention import (
    attention_bwd_reference,
    attention_reference,
)
from jaxkern.primitives.attention.mask import as_causal, check_softcap
from jaxkern.primitives.attention.operands import AttentionOperands, AttentionOptions
from jaxkern.primitives.attention.scale import with_static_scale
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.kv_cache.update_paged_kv_cache import (
    gather_pages,
    page_exists,
    scatter_pages,
)


@check_arguments
def paged_attention(
    query: Float[Array, "b t k*g h"],
    key_pages: Float[Array, "num_pages page k h"],
    value_pages: Float[Array, "num_pages page k hv"],
    block_tables: Int[Array, "b pages"],
    kv_lengths: Int[Array, " b"],
    *,
    q_offset: int | Int[Array, " b"] | None = None,
    sinks: Float[Array, " k*g"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "b t k*g hv"]
    | tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]
):
    """`attention` where the keys of sequence b are the pages that its table names.

        key[b] = key_pages[block_tables[b]], one page after the other, likewise value
        out = attention(query, key, value, kv_lengths=kv_lengths, causal=causal, ...)

    Visibility, grouped heads, order of the scores, float32 sums, rows that see nothing:
    all as in `attention`; but queries are causal and by default the last tokens of
    their sequence. Rows behind `kv_lengths` are not read. A number outside
    0 ... num_pages - 1 in the table stands for a page without keys: its positions are
    hidden. Sequences may share pages; gradients then add up, in float32.

    The plain lowering gathers the pages into `[b, pages * page, k, h]`.

    Source: https://arxiv.org/abs/2309.06180.

    Args:
      query: `[b, t, n, h]`, n = k*g heads.
      key_pages: `[num_pages, page, k, h]`, may differ from query in dtype.
      value_pages: `[num_pages, page, k, hv]`.
      block_tables: `[b, pages]` int, may be traced.
      kv_lengths: `[b]` int, tokens of each sequence, may be traced. What is more than
        pages * page has no keys.
      q_offset: position of query row 0, a number or `[b]`. Default kv_lengths - t.
      sinks, scale, causal, window, softcap, return_lse: as in `attention`.

    Returns:
      out: `[b, t, n, hv]`, dtype of query.
      lse: `[b, t, n]`, float32; only with return_lse.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: an option out of range.

    Example:
      >>> pages = jnp.arange(8.0).reshape(4, 2, 1, 1)  # four pages of two tokens
      >>> query, tables = jnp.zeros((1, 1, 1, 1)), jnp.array([[3, 0]])
      >>> lengths = jnp.array([3])  # 6 and 7 of page 3, 0 of page 0
      >>> jaxkern.paged_attention(query, pages, pages, tables, lengths)
      Array([[[[4.333]]]], dtype=float32)
    """
    causal, window, shift = as_causal("paged_attention", window, causal)
    check_softcap("paged_attention", softcap)
    if query.ndim != 4:
        raise TypeError(
            f"paged_attention: `query` must have dims [b, t, heads, head dim], got "
            f"shape {query.shape}."
        )
    query, scale = with_static_scale("paged_attention", query, scale)
    b, t, _, _ = query.shape
    if q_offset is None:
        causal = causal and t != 1  # the last token sees them all
        q_offset = kv_lengths - t
    if shift:
        q_offset = q_offset + shift
    positioned = causal or window is not None
    out, lse = paged_attention_p(
        query,
        key_pages,
        value_pages,
        block_tables,
        kv_lengths,
        per_sequence("paged_attention", "q_offset", q_offset, (b,))
        if positioned
        else None,
        sinks,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return (out, lse) if return_lse else out


class PagedOperands(NamedTuple):
    query: Float[Array, "b t k*g h"]
    key_pages: Float[Array, "num_pages page k h"]
    value_pages: Float[Array, "num_pages page k hv"]
    block_tables: Int[Array, "b pages"]
    kv_lengths: Int[Array, " b"]
    q_offset: Int[Array, " b"] | None
    sinks: Float[Array, " k*g"] | None

    def gathered(self) -> AttentionOperands:
        return AttentionOperands(
            self.query,
            gather_pages(self.key_pages, self.block_tables),
            gather_pages(self.value_pages, self.block_tables),
            mask=page_mask(self.block_tables, self.key_pages),
            kv_lengths=self.kv_lengths,
            q_offset=self.q_offset,
            sinks=self.sinks,
        )


def paged_attention_reference(
    o: PagedOperands, **options: Unpack[AttentionOptions]
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]:
    return attention_reference(o.gathered(), **options)


def paged_attention_bwd_reference(
    o: PagedOperands,
    out: Float[Array, "b t k*g hv"],
    lse: Float[Array, "b t k*g"],
    dout: Float[Array, "b t k*g hv"],
    dlse: Float[Array, "b t k*g"],
    **options: Unpack[AttentionOptions],
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "num_pages page k h"],
    Float[Array, "num_pages page k hv"],
    Float[Array, " k*g"] | None,
]:
    whole = o.gathered()
    # float32, so that the gradients of a shared page are rounded after their sum
    key, value = at_least_f32(whole.key), at_least_f32(whole.value)
    whole = whole._replace(key=key, value=value)
    d = attention_bwd_reference(whole, out, lse, None, dout, dlse, **options)
    dkey = scatter_pages(d.key, o.block_tables, o.key_pages)
    dvalue = scatter_pages(d.value, o.block_tables, o.value_pages)
    dkey, dvalue = dkey.astype(o.key_pages.dtype), dvalue.astype(o.value_pages.dtype)
    return d.query, dkey, dvalue, d.sinks


def page_mask(block_tables, pages):
    """`[b, 1, 1, s]`: the keys that are in some page."""
    n, page = pages.shape[:2]
    exists = page_exists(block_tables, n)
    b, m = exists.shape
    rows = jnp.broadcast_to(exists[:, :, None], (b, m, page))
    return rows.reshape(b, 1, 1, m * page)


paged_attention_p = kernel_primitive(
    paged_attention_reference,
    bwd=paged_attention_bwd_reference,
    # as attention; a table may name any page
    replicated=("t", "num_pages", "page", "pages", "h", "hv"),
)
