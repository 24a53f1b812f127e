"""Attention over keys and values, maybe a window of them, with a gate or sinks.

q, k, v, gate = x W             q, k rotated, after a norm of each head, or of all heads
                                at once, where it has one
y = attention(q, k, v) * sigmoid(gate)              the gate in Qwen3-Next, Qwen3.5
out = y O
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern import (
    KVCache,
    apply_rope,
    empty_kv_cache,
    rms_norm,
    sigmoid_gate,
)
from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.cached_steps import attend, attend_in_one
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.mixers.mixing import Mixing, QueryGrowth, Rotation
from jaxkern.models.products import Matrices
from jaxkern.models.weight_reader import WeightReader
from jaxkern.primitives.attention.qk_norm_rope_cache_attention import heads_and_gates
from jaxkern.primitives.rope.rope import Pairing


class AttentionWeights(NamedTuple):
    """None for what the architecture does not have.

    Attributes:
      qkv: rows of q, k and v; with `output_gate` those of q of a head, then its gate's.
    """

    qkv: Matrices
    output: Matrices
    qkv_bias: Float[Array, " f"] | None = None
    output_bias: Float[Array, " d"] | None = None
    q_norm: Float[Array, " h"] | Float[Array, " n*h"] | None = None
    k_norm: Float[Array, " h"] | Float[Array, " k*h"] | None = None
    sinks: Float[Array, " n"] | None = None


@dataclass(frozen=True)
class FullAttention:
    """Options of the layer; `rotation` None for none (NoPE)."""

    heads: int
    kv_heads: int
    head_dim: int
    rotation: Rotation | None
    window: int | None = None
    scale: float | None = None
    output_gate: bool = False
    pairing: Pairing = "neox"
    bias: bool = False
    qkv_bias: bool = False  # of q, k and v alone
    head_norms: bool = False
    wide_norms: bool = False  # those of q and k are over all heads at once
    sinks: bool = False
    growth: QueryGrowth | None = None

    def empty_state(self, batch: int, slots: int, dtype: CacheForm) -> KVCache:
        """No tokens; all slots also for a window, so that none is overwritten."""
        sizes = (batch, slots, self.kv_heads, self.head_dim)
        return empty_kv_cache(*sizes, dtype=dtype)

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files."""
        h = self.head_dim
        q, k = self.heads * h, self.kv_heads * h
        wide = 2 * q if self.output_gate else q
        rows = {"q": (wide, d), "k": (k, d), "v": (k, d), "output": (d, q)}
        found: Shapes = {f"attn_{n}.weight": shape for n, shape in rows.items()}
        biased = "q k v output" if self.bias else "q k v" if self.qkv_bias else ""
        found |= {f"attn_{n}.bias": rows[n][:1] for n in biased.split()}
        if self.head_norms or self.wide_norms:
            sizes = {"q": q, "k": k} if self.wide_norms else dict.fromkeys("qk", h)
            found |= {f"attn_{n}_norm.weight": (size,) for n, size in sizes.items()}
        if self.sinks:
            found["attn_sinks.weight"] = (self.heads,)
        return found

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> AttentionWeights:
        q, k, v, out = (f"{blk}.attn_{name}" for name in ("q", "k", "v", "output"))
        return AttentionWeights(
            qkv=reader.matrices(f"{q}.weight", f"{k}.weight", f"{v}.weight"),
            output=reader.matrices(f"{out}.weight"),
            qkv_bias=reader.vectors(f"{q}.bias", f"{k}.bias", f"{v}.bias"),
            output_bias=reader.vectors(f"{out}.bias"),
            q_norm=reader.vectors(f"{q}_norm.weight", plus=layout.plus),
            k_norm=reader.vectors(f"{k}_norm.weight", plus=layout.plus),
            sinks=reader.vectors(f"{blk}.attn_sinks.weight"),
        )

    def __call__(
        self,
        config,
        weights: AttentionWeights,
        branch: Branch,
        state: KVCache | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], KVCache | None]:
        b, t, _ = branch.x.shape
        n, k, h = self.heads, self.kv_heads, self.head_dim
        y = branch.project(config, weights.qkv, weights.qkv_bias)
        query, key, value = jnp.split(y, (-2 * k * h, -k * h), axis=-1)
        query = query.reshape(b, t, n, -1)
        key, value = (a.reshape(b, t, k, h) for a in (key, value))
        out, state = self.attended(config, weights, query, key, value, state, at)
        output = weights.output, weights.output_bias
        return branch.joined(config, out.reshape(b, t, n * h), *output), state

    def attended(
        self, config, weights, query, key, value, state: KVCache | None, at: Mixing
    ) -> tuple[Float[Array, "b t n h"], KVCache | None]:
        """Norms of the heads and rotations, then attention and its gate.

        query: `[b, t, n, h]`, or with `output_gate` `[b, t, n, 2 h]`.
        """
        norms = weights.q_norm, weights.k_norm
        if self.wide_norms:
            query, key = (
                rms_norm(y.reshape(*y.shape[:2], -1), norm, eps=config.eps)
                for y, norm in zip((query, key), norms, strict=True)
            )
            query, key = (
                y.reshape(*y.shape[:2], -1, self.head_dim) for y in (query, key)
            )
            norms = None, None
        tables = None if self.rotation is None else at.tables[self.rotation]
        options: dict = dict(window=self.window, scale=self.scale, sinks=weights.sinks)
        alike = (norms[0] is None) == (norms[1] is None)
        one_op = config.fused and alike and self.growth is None
        if one_op and tables is not None and state is not None and not state.ring:
            forms: dict = dict(eps=config.eps, pairing=self.pairing)
            forms |= dict(gated=self.output_gate)
            cached = tables, state, at.new_lengths
            return attend_in_one(query, key, value, norms, *cached, **forms, **options)
        query, gate = heads_and_gates(query, self.head_dim, self.output_gate)
        query, key = (
            y if norm is None else rms_norm(y, norm, eps=config.eps)
            for y, norm in zip((query, key), norms, strict=True)
        )
        if tables is not None:
            query, key = (
                apply_rope(y, *tables, pairing=self.pairing) for y in (query, key)
            )
        if self.growth is not None:
            query = self.growth(query, at.positions)
        out, state = attend(
            query, key, value, state, at.new_lengths, at.segment_ids, **options
        )
        return out if gate is None else sigmoid_gate(out, gate), state
