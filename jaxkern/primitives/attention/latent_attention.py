"""Attention over one latent vector a token: its first dims are the value, all the key.

The decode form of multi-head latent attention (https://arxiv.org/abs/2405.04434), with
the up-projections of keys and values absorbed into query and output projections.
"""

from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.attention.attention import (
    attention,
    attention_bwd_reference,
    attention_reference,
)
from jaxkern.primitives.attention.dropout import Dropout
from jaxkern.primitives.attention.mask import checked_visibility
from jaxkern.primitives.attention.operands import AttentionOperands, AttentionOptions
from jaxkern.primitives.attention.scale import with_static_scale
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import per_sequence
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def latent_attention(
    query: Float[Array, "b t n h"],
    latent: Float[Array, "b s h"],
    *,
    value_dim: int,
    scale: float | Float[Array, ""],
    kv_lengths: Int[Array, " b"] | None = None,
    q_offset: int | Int[Array, " b"] | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "b t n value_dim"]
    | tuple[Float[Array, "b t n value_dim"], Float[Array, "b t n"]]
):
    """Attention of n heads over one cache whose rows are key and value at once.

        attention(query, latent[:, :, None], latent[:, :, None, :value_dim], ...)

    which would copy the values. DeepSeek's cache has 512 dims, and 64 rotated ones
    behind them that are no part of the values: a kernel reads a row once for both.

    Source: https://arxiv.org/abs/2405.04434.

    Args:
      query: `[b, t, n, h]`, any float dtype; per head the absorbed part of value_dim
        dims, then the rotated part.
      latent: `[b, s, h]`, any float dtype.
      value_dim: how many of the h dims are the value, 1 to h.
      scale: of the scores. That of the heads before they were absorbed, for DeepSeek's
        (128 + 64)**-0.5 times its correction for long contexts; h does not tell it.
        As there it may be traced, and learned.
      kv_lengths, q_offset, causal, window, softcap, return_lse: see `attention`.
      dropout: likewise; the call then is that of `attention` above.

    Returns:
      out: `[b, t, n, value_dim]`, dtype of query.
      lse: `[b, t, n]`, only with return_lse.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: an option out of range, or an ambiguous position of the queries.

    Example:
      >>> query, x = jnp.ones((1, 2, 4, 6)), jnp.ones((1, 3, 6))
      >>> out = jaxkern.latent_attention(query, x, value_dim=4, scale=0.4, causal=True)
      >>> out.shape
      (1, 2, 4, 4)
    """
    op = "latent_attention"
    for name, x, ndim in (("query", query, 4), ("latent", latent, 3)):
        if len(x.shape) != ndim:
            raise TypeError(f"{op}: `{name}` must have {ndim} dims, got {x.shape}.")
    b, t, _, h = query.shape
    s = latent.shape[1]
    if not 1 <= value_dim <= h:
        raise ValueError(f"{op}: value_dim is {value_dim}, not 1 to {h}.")
    if (
        dropout is not None and dropout.rate
    ):  # of training, where the reference runs anyway
        return attention(
            query,
            latent[:, :, None],
            latent[:, :, None, :value_dim],
            kv_lengths=kv_lengths,
            q_offset=q_offset,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            dropout=dropout,
            return_lse=return_lse,
        )
    query, scale = with_static_scale(op, query, scale)
    causal, window, q_offset = checked_visibility(
        op, causal, window, softcap, q_offset, kv_lengths, t, s
    )
    out, lse = latent_attention_p(
        query,
        latent,
        per_sequence(op, "kv_lengths", kv_lengths, (b,)),
        per_sequence(op, "q_offset", q_offset, (b,)),
        value_dim=int(value_dim),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return (out, lse) if return_lse else out


class LatentOperands(NamedTuple):
    query: Float[Array, "b t n h"]
    latent: Float[Array, "b s h"]
    kv_lengths: Int[Array, " b"] | None
    q_offset: Int[Array, " b"] | None

    def split(self, value_dim: int) -> AttentionOperands:
        key, value = self.latent[:, :, None], self.latent[:, :, None, :value_dim]
        visible = dict(kv_lengths=self.kv_lengths, q_offset=self.q_offset)
        return AttentionOperands(self.query, key, value, **visible)


def latent_attention_reference(
    o: LatentOperands, *, value_dim: int, **options: Unpack[AttentionOptions]
) -> tuple[Float[Array, "b t n hv"], Float[Array, "b t n"]]:
    return attention_reference(o.split(value_dim), **options)


def latent_attention_bwd_reference(
    o: LatentOperands,
    out: Float[Array, "b t n hv"],
    lse: Float[Array, "b t n"],
    dout: Float[Array, "b t n hv"],
    dlse: Float[Array, "b t n"],
    *,
    value_dim: int,
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "b t n h"], Float[Array, "b s h"]]:
    operands = o.split(value_dim)
    d = attention_bwd_reference(operands, out, lse, None, dout, dlse, **options)
    rest = [(0, 0), (0, 0), (0, o.latent.shape[-1] - value_dim)]
    return d.query, d.key[:, :, 0] + jnp.pad(d.value[:, :, 0], rest)


latent_attention_p = kernel_primitive(
    latent_attention_reference,
    bwd=latent_attention_bwd_reference,
    replicated=("t", "s", "h", "hv"),  # as in attention
)
