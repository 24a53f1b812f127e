"""Attention over keys and values, maybe a window of them, with a gate or sinks.

    q, k, v, gate = x W             q, k rotated, after a norm of each head where it has
    y = attention(q, k, v) * sigmoid(gate)              the gate in Qwen3-Next, Qwen3.5
    out = y O
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkern import (
    KVCache,
    apply_rope,
    attention,
    cached_attention,
    empty_kv_cache,
    rms_norm,
    sigmoid_gate,
)
from jaxkern.models.llama import Matrices, plus, project
from jaxkern.models.mixers.mixing import Mixing, Rotation
from jaxkern.primitives.rope.rope import Pairing


class AttentionWeights(NamedTuple):
    """None for what the architecture does not have.

    Attributes:
      qkv: rows of q, k, v and, with `output_gate`, of the gate.
    """

    qkv: Matrices
    output: Matrices
    qkv_bias: Float[Array, " f"] | None = None
    output_bias: Float[Array, " d"] | None = None
    q_norm: Float[Array, " h"] | None = None
    k_norm: Float[Array, " h"] | None = None
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

    def empty_state(self, batch: int, slots: int, dtype: DTypeLike) -> KVCache:
        """No tokens; all slots also for a window, so that none is overwritten."""
        sizes = (batch, slots, self.kv_heads, self.head_dim)
        return empty_kv_cache(*sizes, dtype=dtype)

    def __call__(
        self,
        config,
        weights: AttentionWeights,
        x: Float[Array, "b t d"],
        state: KVCache | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], KVCache | None]:
        b, t, _ = x.shape
        n, k, h = self.heads, self.kv_heads, self.head_dim
        y = plus(project(config, x, weights.qkv), weights.qkv_bias)
        ends = (n * h, (n + k) * h, (n + 2 * k) * h)
        query, key, value, gate = jnp.split(y, ends, axis=-1)
        query, key, value = (a.reshape(b, t, -1, h) for a in (query, key, value))
        if weights.q_norm is not None:
            query = rms_norm(query, weights.q_norm, eps=config.eps)
        if weights.k_norm is not None:
            key = rms_norm(key, weights.k_norm, eps=config.eps)
        if self.rotation is not None:
            tables = at.tables[self.rotation]
            query, key = (
                apply_rope(a, *tables, pairing=self.pairing) for a in (query, key)
            )
        options: dict = dict(window=self.window, scale=self.scale, sinks=weights.sinks)
        if state is None:
            out = attention(
                query,
                key,
                value,
                causal=True,
                segment_ids=at.segment_ids,
                **options,
            )
            assert isinstance(out, jax.Array)  # no lse was asked for
        else:
            out, state = cached_attention(  # pyright: ignore[reportAssignmentType]
                query, key, value, state, at.new_lengths, **options
            )
        out = out.reshape(b, t, n * h)
        if self.output_gate:
            out = sigmoid_gate(out, gate)
        return plus(project(config, out, weights.output), weights.output_bias), state
