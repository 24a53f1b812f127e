"""Kimi delta attention: a delta net that forgets by channel, of Kimi Linear.

q, k, v  = silu(conv(x W))                         beta = sigmoid(x B)
g        = -exp(a_log) softplus(x F1 F2 + dt_bias)          a decay of each key channel
y        = kimi_delta_attention(q / |q|, k / |k|, v, g, beta)
out      = (rms_norm(y) * sigmoid(x G1 G2)) O        https://arxiv.org/abs/2510.26692
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern import (
    kimi_delta_attention,
    kimi_delta_attention_step,
    l2_norm,
    rms_norm,
    sigmoid_gate,
)
from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.mixers.mixing import Mixing
from jaxkern.models.mixers.recurrent_state import (
    RecurrentState,
    counted,
    empty_state,
    grown,
    short_convolution,
)
from jaxkern.models.products import Matrices, project
from jaxkern.models.weight_reader import WeightReader

QKV = "qkv"


class KimiDeltaWeights(NamedTuple):
    """Weights of the layer.

    Attributes:
      input: rows of q, k and v, those into the two gates, and one of beta a head.
      convolution: of q, k and v.
      forget, open: from the gates' few channels to all, of the decay and the output.
    """

    input: Matrices
    convolution: Float[Array, "c w"]
    forget: Matrices
    open: Matrices
    a_log: Float[Array, " n"]
    dt_bias: Float[Array, "n h"]
    norm: Float[Array, " h"]
    output: Matrices


@dataclass(frozen=True)
class KimiDelta:
    """Sizes of the layer; the gates pass through `head_dim` channels."""

    heads: int
    head_dim: int
    taps: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def empty_state(self, batch: int, slots: int, dtype: CacheForm) -> RecurrentState:
        del slots, dtype  # it does not grow, and small steps need float32
        memory = (self.heads, self.head_dim, self.head_dim)
        return empty_state(batch, self.taps - 1, 3 * self.width, memory)

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files, where those have them."""
        wide, low = self.width, self.head_dim
        rows = {f"attn_{x}": (wide, d) for x in QKV}
        rows |= {f"ssm_{x}_a": (low, d) for x in "fg"}
        rows |= {f"ssm_{x}_b": (wide, low) for x in "fg"}
        rows |= {"ssm_beta": (self.heads, d), "attn_output": (d, wide)}
        found: Shapes = {f"{name}.weight": shape for name, shape in rows.items()}
        found |= {f"ssm_conv1d_{x}.weight": (wide, 1, self.taps) for x in QKV}
        return found | {
            "ssm_a_log": (1, 1, self.heads, 1),
            "ssm_dt.bias": (wide,),
            "ssm_norm.weight": (low,),
        }

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> KimiDeltaWeights:
        taps = [reader.vector(f"{blk}.ssm_conv1d_{x}.weight")[:, 0] for x in QKV]
        names = [f"attn_{x}" for x in QKV] + ["ssm_f_a", "ssm_g_a", "ssm_beta"]
        dt_bias = reader.vector(f"{blk}.ssm_dt.bias")
        return KimiDeltaWeights(
            input=reader.matrices(*(f"{blk}.{name}.weight" for name in names)),
            convolution=jnp.concatenate(taps),
            forget=reader.matrices(f"{blk}.ssm_f_b.weight"),
            open=reader.matrices(f"{blk}.ssm_g_b.weight"),
            a_log=reader.vector(f"{blk}.ssm_a_log").reshape(-1),
            dt_bias=dt_bias.reshape(self.heads, self.head_dim),
            norm=reader.vector(f"{blk}.ssm_norm.weight"),
            output=reader.matrices(f"{blk}.attn_output.weight"),
        )

    def __call__(
        self,
        config,
        weights: KimiDeltaWeights,
        branch: Branch,
        state: RecurrentState | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], RecurrentState | None]:
        heads = (*branch.x.shape[:2], self.heads, self.head_dim)
        ends = [3 * self.width + i * self.head_dim for i in range(3)]
        parts = jnp.split(branch.project(config, weights.input), ends, axis=-1)
        qkv, forget, opened, write = parts
        qkv, inputs = short_convolution(
            qkv, weights.convolution, None, state, at, "silu"
        )
        query, key, value = (y.reshape(heads) for y in jnp.split(qkv, 3, axis=-1))
        forget = project(config, forget, weights.forget).reshape(heads)
        rate = jax.nn.softplus(forget.astype(jnp.float32) + weights.dt_bias)
        g = -jnp.exp(weights.a_log)[:, None] * rate
        beta = jax.nn.sigmoid(write.astype(jnp.float32))
        operands = (l2_norm(query), l2_norm(key), value, g, beta)
        if state is None:
            y, _ = kimi_delta_attention(*operands, segment_ids=at.segment_ids)
        else:
            assert state.memory is not None and inputs is not None
            if branch.x.shape[1] == 1:
                query, key, value, g, beta = (
                    y[:, 0] for y in (*operands[:3], counted(g, at), counted(beta, at))
                )
                y, memory = kimi_delta_attention_step(
                    query, key, value, g, beta, state.memory
                )
            else:
                y, memory = kimi_delta_attention(
                    *operands, state.memory, active_length=at.new_lengths
                )
            lengths = grown(state, branch.x, at)
            state = replace(state, inputs=inputs, memory=memory, lengths=lengths)
        opened = project(config, opened, weights.open).reshape(heads)
        y = rms_norm(y.reshape(heads), weights.norm, eps=config.eps)
        y = sigmoid_gate(y, opened).reshape(*heads[:2], self.width)
        return branch.joined(config, y, weights.output), state
