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
from jaxtyping import Array, Float, Int32

from jaxkern import apply_rope, attention, latent_attention, rms_norm, update_kv_cache
from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.mixers.mixing import Mixing, QueryGrowth, Rotation
from jaxkern.models.products import Matrices, plus, project
from jaxkern.models.weight_reader import WeightReader
from jaxkern.primitives.rope.rope import Pairing
from jaxkern.primitives.turboquant.vector_codec import VectorCodec


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
    bias: bool = False
    growth: QueryGrowth | None = None
    apart: bool = False  # keys and values come up by two tensors, the first transposed

    def empty_state(self, batch: int, slots: int, dtype: CacheForm) -> LatentCache:
        if isinstance(dtype, VectorCodec):
            raise ValueError(
                f"cache: latents have no quantised form, got {dtype}. Take f32, f16 or "
                "bf16."
            )
        rows = jnp.zeros((batch, slots, self.latent + self.rotary_dim), dtype)
        return LatentCache(rows, jnp.zeros(batch, jnp.int32))

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files."""
        n, low = self.heads, self.query_latent
        wide, down = n * (self.plain_dim + self.rotary_dim), self.latent
        rows: Shapes = {
            "attn_kv_a_mqa": (down + self.rotary_dim, d),
            "attn_output": (d, n * self.value_dim),
        }
        if self.apart:
            rows["attn_k_b"] = (n, down, self.plain_dim)
            rows["attn_v_b"] = (n, self.value_dim, down)
        else:
            rows["attn_kv_b"] = (n * (self.plain_dim + self.value_dim), down)
        with_bias = ["attn_kv_a_mqa", "attn_output"]
        norms = {"attn_kv_a_norm": down}
        if low:
            rows |= {"attn_q_a": (low, d), "attn_q_b": (wide, low)}
            norms |= {"attn_q_a_norm": low}
            with_bias.append("attn_q_a")
        else:
            rows["attn_q"] = (wide, d)
        found = {f"{name}.weight": shape for name, shape in rows.items()}
        found |= {f"{name}.weight": (size,) for name, size in norms.items()}
        if self.bias:
            found |= {f"{name}.bias": rows[name][:1] for name in with_bias}
        return found

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> LatentWeights:
        low = self.query_latent
        query = f"{blk}.attn_q_b.weight" if low else f"{blk}.attn_q.weight"
        if self.apart:
            up_key, up_value = (reader.array(f"{blk}.attn_{x}_b.weight") for x in "kv")
            up_key = jnp.swapaxes(up_key, 1, 2)
        else:
            up = reader.array(f"{blk}.attn_kv_b.weight")
            up = up.reshape(self.heads, -1, self.latent)
            up_key, up_value = up[:, : self.plain_dim], up[:, self.plain_dim :]
        return LatentWeights(
            query_down=reader.matrices(f"{blk}.attn_q_a.weight") if low else None,
            query_norm=reader.vectors(f"{blk}.attn_q_a_norm.weight"),
            query=reader.matrices(query),
            down=reader.matrices(f"{blk}.attn_kv_a_mqa.weight"),
            norm=reader.vector(f"{blk}.attn_kv_a_norm.weight"),
            up_key=up_key,
            up_value=up_value,
            output=reader.matrices(f"{blk}.attn_output.weight"),
            query_down_bias=reader.vectors(f"{blk}.attn_q_a.bias"),
            down_bias=reader.vectors(f"{blk}.attn_kv_a_mqa.bias"),
            output_bias=reader.vectors(f"{blk}.attn_output.bias"),
        )

    def __call__(
        self,
        config,
        weights: LatentWeights,
        branch: Branch,
        state: LatentCache | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], LatentCache | None]:
        b, t, _ = branch.x.shape
        n, n_plain = self.heads, self.plain_dim
        branch = branch.normalised(config)  # which two products read
        query = branch.reads
        if weights.query_down is not None:
            query = branch.project(config, weights.query_down)
            query = plus(query, weights.query_down_bias)
            query = rms_norm(query, weights.query_norm, eps=self.eps)
        query = project(config, query, weights.query)
        query = query.reshape(b, t, n, n_plain + self.rotary_dim)
        plain, rotated = query[..., :n_plain], query[..., n_plain:]
        down = branch.project(config, weights.down, weights.down_bias)
        latent = rms_norm(down[..., : self.latent], weights.norm, eps=self.eps)
        shared = down[..., None, self.latent :]  # [b, t, 1, r]
        if self.rotation is not None:
            tables = at.tables[self.rotation]
            rotated, shared = (
                apply_rope(a, *tables, pairing=self.pairing) for a in (rotated, shared)
            )
        if self.growth is not None:
            plain, rotated = (self.growth(a, at.positions) for a in (plain, rotated))
        if state is None:
            y = self.of_heads(weights, plain, rotated, latent, shared, at)
        else:
            rows = jnp.concatenate([latent, shared[:, :, 0]], axis=-1)
            y, state = self.absorbed(weights, plain, rotated, rows, state, at)
        y = y.reshape(b, t, n * self.value_dim)
        return branch.joined(config, y, weights.output, weights.output_bias), state

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
