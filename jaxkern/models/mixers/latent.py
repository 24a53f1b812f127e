"""Multi-head latent attention of DeepSeek: the cache holds one small vector a token.

    latent, shared = x A            latent = rms_norm(latent), shared is rotated
    k_i, v_i       = latent U_i, latent V_i         of head i; its key is [k_i, shared]
    q_i            = [x Q_i, rotated part]
    out            = concat_i(attention(q_i, [k_i, shared], v_i)) O

Over a cache the products with U and V go to the queries and results instead, so that
keys and values of the heads are never made  (https://arxiv.org/abs/2405.04434, B).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxkern import apply_rope, attention, latent_attention, rms_norm, update_kv_cache
from jaxkern.models.llama import Matrices, plus, project
from jaxkern.models.mixers.mixing import Mixing, Rotation
from jaxkern.primitives.rope.rope import Pairing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """What b sequences have read; the token at position p is in slot p.

    Attributes:
      rows: `[b, s, latent + rotary]`, normalised latents and the rotated shared keys.
      lengths: `[b]` int32, tokens that each sequence has had.
    """

    rows: Float[Array, "b s h"]
    lengths: Int32[Array, " b"]


class LatentWeights(NamedTuple):
    """Weights of the layer.

    Attributes:
      query_down, query_norm: of a low-rank query, else None.
      query: rows of each head, those without a position first.
      down: to the latent, then the shared key.
      up_key, up_value: from the latent to each head.
    """

    query_down: Matrices | None
    query_norm: Float[Array, " lq"] | None
    query: Matrices
    down: Matrices
    norm: Float[Array, " l"]
    up_key: Float[Array, "n h l"]
    up_value: Float[Array, "n hv l"]
    output: Matrices
    query_down_bias: Float[Array, " lq"] | None = None
    down_bias: Float[Array, " f"] | None = None
    output_bias: Float[Array, " d"] | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of the layer; `rotation` None where the shared key has no position."""

    heads: int
    latent: int
    query_latent: int  # 0: queries come from x itself
    plain_dim: int  # of a query without a position
    rotary_dim: int
    value_dim: int
    scale: float
    rotation: Rotation | None
    pairing: Pairing = "interleaved"
    eps: float = 1e-6  # of the norms of the latents

    def empty_state(self, batch: int, slots: int, dtype: DTypeLike) -> LatentCache:
        rows = jnp.zeros((batch, slots, self.latent + self.rotary_dim), dtype)
        return LatentCache(rows, jnp.zeros(batch, jnp.int32))

    def __call__(
        self,
        config,
        weights: LatentWeights,
        x: Float[Array, "b t d"],
        state: LatentCache | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], LatentCache | None]:
        b, t, _ = x.shape
        n, n_plain = self.heads, self.plain_dim
        query = x
        if weights.query_down is not None:
            query = project(config, x, weights.query_down)
            query = plus(query, weights.query_down_bias)
            query = rms_norm(query, weights.query_norm, eps=self.eps)
        query = project(config, query, weights.query)
        query = query.reshape(b, t, n, n_plain + self.rotary_dim)
        plain, rotated = query[..., :n_plain], query[..., n_plain:]
        down = plus(project(config, x, weights.down), weights.down_bias)
        latent = rms_norm(down[..., : self.latent], weights.norm, eps=self.eps)
        shared = down[..., None, self.latent :]  # [b, t, 1, r]
        if self.rotation is not None:
            tables = at.tables[self.rotation]
            rotated, shared = (
                apply_rope(a, *tables, pairing=self.pairing) for a in (rotated, shared)
            )
        if state is None:
            y = self.of_heads(weights, plain, rotated, latent, shared, at)
        else:
            rows = jnp.concatenate([latent, shared[:, :, 0]], axis=-1)
            y, state = self.absorbed(weights, plain, rotated, rows, state, at)
        y = y.reshape(b, t, n * self.value_dim)
        return plus(project(config, y, weights.output), weights.output_bias), state

    def of_heads(self, weights, plain, rotated, latent, shared, at: Mixing):
        """With the keys and values of all heads: fewer products where t is large."""
        key = jnp.einsum("btl,nhl->btnh", latent, weights.up_key.astype(latent.dtype))
        value = jnp.einsum(
            "btl,nhl->btnh", latent, weights.up_value.astype(latent.dtype)
        )
        shared = jnp.broadcast_to(shared, rotated.shape)
        y = attention(
            jnp.concatenate([plain, rotated], axis=-1),
            jnp.concatenate([key, shared], axis=-1),
            value,
            scale=self.scale,
            causal=True,
            segment_ids=at.segment_ids,
        )
        assert isinstance(y, jax.Array)  # no lse was asked for
        return y

    def absorbed(self, weights, plain, rotated, rows, state: LatentCache, at: Mixing):
        """Over the rows of the cache alone."""
        held = update_kv_cache(
            state.rows[:, :, None], rows[:, :, None], state.lengths, at.new_lengths
        )[:, :, 0]
        new = rows.shape[1] if at.new_lengths is None else at.new_lengths
        after = replace(state, rows=held, lengths=state.lengths + new)
        up_key, up_value = (
            w.astype(plain.dtype) for w in (weights.up_key, weights.up_value)
        )
        query = jnp.einsum("btnh,nhl->btnl", plain, up_key)
        y = latent_attention(
            jnp.concatenate([query, rotated], axis=-1),
            held,
            value_dim=self.latent,
            scale=self.scale,
            kv_lengths=after.lengths,
            q_offset=state.lengths,
            causal=True,
        )
        assert isinstance(y, jax.Array)  # no lse was asked for
        return jnp.einsum("btnl,nhl->btnh", y, up_value), after
