"""Gated delta net: a linear memory that corrects itself, of Qwen3-Next and Qwen3.5.

    q, k, v  = silu(conv(x W))           z, b, a = x W
    g, beta  = -exp(a_log) softplus(a + dt_bias), sigmoid(b)
    y        = gated_delta_rule(q / |q|, k / |k|, v, g, beta)
    out      = (rms_norm(y) * silu(z)) O                https://arxiv.org/abs/2412.06464
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkern import (
    compute_g_beta,
    gated_delta_rule,
    gated_delta_step,
    gated_rms_norm,
    l2_norm,
)
from jaxkern.models.llama import Matrices, project
from jaxkern.models.mixers.mixing import Mixing
from jaxkern.models.mixers.recurrent_state import (
    RecurrentState,
    empty_state,
    grown,
    short_convolution,
)


class DeltaNetWeights(NamedTuple):
    """Weights of the layer.

    Attributes:
      input: rows of q, k, v and z, then of b and a, one of each a value head.
      convolution: of q, k and v.
    """

    input: Matrices
    convolution: Float[Array, "c w"]
    a_log: Float[Array, " n"]
    dt_bias: Float[Array, " n"]
    norm: Float[Array, " hv"]
    output: Matrices


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the layer: value head i reads key head i // (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def empty_state(self, batch: int, slots: int, dtype: DTypeLike) -> RecurrentState:
        del slots, dtype  # it does not grow, and small steps need float32
        memory = (self.value_heads, self.key_dim, self.value_dim)
        return empty_state(batch, self.taps - 1, self.channels, memory)

    def __call__(
        self,
        config,
        weights: DeltaNetWeights,
        x: Float[Array, "b t d"],
        state: RecurrentState | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], RecurrentState | None]:
        b, t, _ = x.shape
        values = self.value_heads * self.value_dim
        ends = (self.channels, self.channels + values)
        ends += (ends[1] + self.value_heads,)
        qkv, z, write, rate = jnp.split(project(config, x, weights.input), ends, -1)
        qkv, inputs = short_convolution(
            qkv, weights.convolution, None, state, at, "silu"
        )
        keys = self.key_heads * self.key_dim
        query, key, value = jnp.split(qkv, (keys, 2 * keys), axis=-1)
        query, key = (
            l2_norm(y.reshape(b, t, self.key_heads, self.key_dim)) for y in (query, key)
        )
        value = value.reshape(b, t, self.value_heads, self.value_dim)
        g, beta = compute_g_beta(rate, write, weights.a_log, weights.dt_bias)
        operands = (query, key, value, g, beta)
        if state is None:
            y, _ = gated_delta_rule(*operands, segment_ids=at.segment_ids)
        else:
            assert state.memory is not None and inputs is not None
            if t == 1 and at.new_lengths is None:
                token = (operand[:, 0] for operand in operands)
                y, memory = gated_delta_step(*token, state.memory)
            else:
                y, memory = gated_delta_rule(
                    *operands, state.memory, active_length=at.new_lengths
                )
            state = replace(
                state, inputs=inputs, memory=memory, lengths=grown(state, x, at)
            )
        y, z = (a.reshape(b, t, self.value_heads, self.value_dim) for a in (y, z))
        y = gated_rms_norm(y, z, weights.norm, eps=config.eps)
        return project(config, y.reshape(b, t, values), weights.output), state
