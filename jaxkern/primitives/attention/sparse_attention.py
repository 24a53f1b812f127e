"""Attention of each query over the keys that were selected for it, and over no others.

As in DeepSeek V3.2, which selects tokens for all heads, and with blocks of keys for
each head in NSA (https://arxiv.org/abs/2502.11089) and MoBA
(https://arxiv.org/abs/2502.13189).
"""

from typing import NamedTuple, TypedDict, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkern.primitives.attention.attention import (
    attention_bwd_reference,
    attention_reference,
)
from jaxkern.primitives.attention.by_rows import first_positions
from jaxkern.primitives.attention.mask import checked_visibility
from jaxkern.primitives.attention.operands import AttentionOperands, AttentionOptions
from jaxkern.primitives.attention.scale import with_static_scale
from jaxkern.primitives.attention.selection import (
    check_block_size,
    for_each_head,
    selected_rows,
    selection_mask,
    taken,
    without_repeats,
)
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def sparse_attention(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k hv"] | None,
    indices: Int[Array, "b t #k selected"],
    *,
    block_size: int = 1,
    value_dim: int | None = None,
    kv_lengths: Int[Array, " b"] | None = None,
    q_offset: int | Int[Array, " b"] | None = None,
    causal: bool = False,
    scale: float | Float[Array, ""] | None = None,
    unique_indices: bool = False,
    return_lse: bool = False,
) -> (
    Float[Array, "b t k*g hv"]
    | tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]
):
    """`attention` where each query sees only the keys that its indices name.

        S_i = {j : j // block_size in indices[i]}, less the keys that are hidden
        out_i = sum_{j in S_i} exp(scale q_i . k_j - lse_i) v_j
        lse_i = ln(sum_{j in S_i} exp(scale q_i . k_j))

    An index is the number of a key, or of a block of `block_size` keys of which the
    last may be short. The order does not matter, and a number that comes twice counts
    once. A number outside 0 ... ceil(s / block_size) - 1, such as the -1 of
    `select_keys`, names nothing. Keys behind `kv_lengths`, and with `causal` those
    after a query's own position, are hidden in a block that is selected too. A query
    without keys gives zeros, lse = -inf and zero gradients.

    Grouped heads, float32 sums and the rounding are those of `attention`. What lies
    behind `kv_lengths` has no influence, be it NaN; a NaN in another key that is not
    selected may have.

    The plain lowering gathers the selected rows where these are fewer than s for all t
    queries together, as in decoding; else it masks, and holds a mask `[b, k, t, s]`.

    Source: https://arxiv.org/abs/2502.11089, https://arxiv.org/abs/2502.13189.

    Args:
      query: `[b, t, n, h]`, any float dtype, n = k*g heads.
      key: `[b, s, k, h]`, may differ from query in dtype.
      value: `[b, s, k, hv]`; None where the first `value_dim` dims of a key are its
        value, as in the latent cache of DeepSeek: `latent[:, :, None]` is the key.
      indices: `[b, t, k, selected]` int, for each key head, or `[b, t, 1, selected]`
        or `[b, t, selected]` for all heads. May be traced.
      block_size: keys of a block, 1 or more.
      value_dim: 1 to h, only where value is None. Default h.
      kv_lengths: `[b]` int, may be traced: only the first rows are keys.
      q_offset: position of query row 0 among the keys, a number or `[b]`, may be
        traced. Default s - t. Only read with causal.
      causal: queries see no key after their own position.
      scale: of the scores, default h ** -0.5; see `attention`.
      unique_indices: a promise that no valid number comes twice in a row of `indices`,
        as `select_keys` gives them. It saves the comparison of all pairs; where it is
        broken, how often such a key counts is undefined.
      return_lse: return (out, lse), for `merge_partials` with attention over keys that
        no index names.

    Returns:
      out: `[b, t, n, hv]`, dtype of query.
      lse: `[b, t, n]`, natural logarithm, float32; only with return_lse.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: an option out of range, or an ambiguous position of the queries.

    Example:
      >>> key = jnp.arange(6.0).reshape(1, 6, 1, 1)  # [b, s, heads, h]
      >>> query = jnp.zeros((1, 2, 1, 1))
      >>> keys = jnp.array([[[4, 1, -1], [-1, -1, -1]]])  # of two queries
      >>> jaxkern.sparse_attention(query, key, key, keys)[0, :, 0, 0]
      Array([2.5, 0. ], dtype=float32)
      >>> blocks = jnp.array([[[0], [2]]])  # keys 0 and 1; 4 and 5
      >>> jaxkern.sparse_attention(query, key, key, blocks, block_size=2)[0, :, 0, 0]
      Array([0.5, 4.5], dtype=float32)
    """
    op = "sparse_attention"
    indices = indices[:, :, None] if indices.ndim == 3 else indices
    for name, x in (("query", query), ("key", key), ("indices", indices)):
        if x.ndim != 4:
            raise TypeError(f"{op}: `{name}` must have 4 dims, got shape {x.shape}.")
    b, t, _, h = query.shape
    check_block_size(op, block_size)
    if value_dim is not None and (value is not None or not 1 <= value_dim <= h):
        raise ValueError(
            f"{op}: value_dim is {value_dim}. It is 1 to {h}, the dims of a key that "
            "are its value, and only there where `value` is None."
        )
    query, scale = with_static_scale(op, query, scale)
    causal, _, q_offset = checked_visibility(
        op, causal, None, None, q_offset, kv_lengths, t, key.shape[1]
    )
    out, lse = sparse_attention_p(
        query,
        key,
        value,
        indices,
        per_sequence(op, "kv_lengths", kv_lengths, (b,)),
        per_sequence(op, "q_offset", q_offset, (b,)),
        block_size=block_size,
        value_dim=value_dim,
        scale=scale,
        causal=causal,
        unique_indices=unique_indices,
    )
    return (out, lse) if return_lse else out


class SparseOptions(TypedDict):
    block_size: int
    value_dim: int | None
    scale: float
    causal: bool
    unique_indices: bool


class SparseOperands(NamedTuple):
    query: Float[Array, "b t k*g h"]
    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k hv"] | None
    indices: Int[Array, "b t #k selected"]
    kv_lengths: Int[Array, " b"] | None
    q_offset: Int[Array, " b"] | None

    def reads_few_rows(self, block_size: int) -> bool:
        """Whether gathering reads fewer rows than the cache has."""
        s = self.key.shape[1]
        rows = self.query.shape[1] * self.indices.shape[3] * block_size
        return isinstance(rows, int) and isinstance(s, int) and rows < s

    def masked(self, block_size: int, value_dim: int | None) -> AttentionOperands:
        """Attention over all keys, those that are not selected behind a mask."""
        named = selection_mask(self.indices, self.key.shape[1], block_size)
        return AttentionOperands(
            self.query,
            self.key,
            self.key[..., :value_dim] if self.value is None else self.value,
            mask=for_each_head(named, self.query.shape[2]),
            kv_lengths=self.kv_lengths,
            q_offset=self.q_offset,
        )

    def gathered(self, **options: Unpack[SparseOptions]) -> AttentionOperands:
        """Attention of b * t sequences of one query over their own keys alone."""
        b, t, n, h = self.query.shape
        at, visible = self.rows(**options)
        key = taken(self.key, at, visible)
        value = None if self.value is None else taken(self.value, at, visible)
        mask = jnp.swapaxes(for_each_head(jnp.swapaxes(visible, 1, 2), n), 1, 2)
        return AttentionOperands(
            self.query.reshape(b * t, 1, n, h),
            key,
            key[..., : options["value_dim"]] if value is None else value,
            mask=mask.reshape(b * t, mask.shape[2], 1, mask.shape[3]),
        )

    def rows(
        self, **options: Unpack[SparseOptions]
    ) -> tuple[Int[Array, "b t #k rows"], Bool[Array, "b t #k rows"]]:
        """The rows that the indices name, and which of them each query sees."""
        s, indices = self.key.shape[1], self.indices
        if not options["unique_indices"]:
            indices = without_repeats(indices)
        at, visible = selected_rows(indices, s, options["block_size"])
        if self.kv_lengths is not None:
            visible &= at < self.kv_lengths[:, None, None, None]
        if options["causal"]:
            p = first_positions(self.q_offset, self.query, self.key)[:, None]
            p = p + jnp.arange(self.query.shape[1])
            visible &= at <= p[:, :, None, None]
        return at, visible


def attention_options(scale: float, causal: bool) -> AttentionOptions:
    return AttentionOptions(scale=scale, causal=causal, window=None, softcap=None)


def sparse_attention_reference(
    o: SparseOperands, **options: Unpack[SparseOptions]
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]:
    block_size, scale = options["block_size"], options["scale"]
    if not o.reads_few_rows(block_size):
        masked = o.masked(block_size, options["value_dim"])
        of_all = attention_options(scale, options["causal"])
        return attention_reference(masked, **of_all)
    gathered = o.gathered(**options)
    out, lse = attention_reference(gathered, **attention_options(scale, False))
    b, t, n, _ = o.query.shape
    return out.reshape(b, t, n, out.shape[-1]), lse.reshape(b, t, n)


def sparse_attention_bwd_reference(
    o: SparseOperands,
    out: Float[Array, "b t k*g hv"],
    lse: Float[Array, "b t k*g"],
    dout: Float[Array, "b t k*g hv"],
    dlse: Float[Array, "b t k*g"],
    **options: Unpack[SparseOptions],
) -> tuple[
    Float[Array, "b t k*g h"],
    Float[Array, "b s k h"],
    Float[Array, "b s k hv"] | None,
]:
    masked = o.masked(options["block_size"], options["value_dim"])
    of_attention = attention_options(options["scale"], options["causal"])
    d = attention_bwd_reference(masked, out, lse, None, dout, dlse, **of_attention)
    if o.value is not None:
        return d.query, d.key, d.value
    rest = o.key.shape[-1] - d.value.shape[-1]
    return d.query, d.key + jnp.pad(d.value, [(0, 0)] * 3 + [(0, rest)]), None


sparse_attention_p = kernel_primitive(
    sparse_attention_reference,
    bwd=sparse_attention_bwd_reference,
    # as attention; an index may name any key
    replicated=("t", "s", "selected", "h", "hv"),
)
