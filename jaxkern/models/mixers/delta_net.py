"""Gated delta net: a linear memory that corrects itself, of Qwen3-Next and Qwen3.5.

q, k, v  = silu(conv(x W))           z, b, a = x W
g, beta  = -exp(a_log) softplus(a + dt_bias), sigmoid(b)
y        = gated_delta_rule(q / |q|, k / |k|, v, g, beta)
out      = (rms_norm(y) * silu(z)) O                https://arxiv.org/abs/2412.06464
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern import (
    compute_g_beta,
    gated_delta_net_inputs,
    gated_delta_net_step,
    gated_delta_net_verify,
    gated_delta_rule,
    gated_delta_step,
    gated_rms_norm,
    l2_norm,
)
from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.mixers.mixing import Mixing
from jaxkern.models.mixers.recurrent_state import (
    DraftedState,
    RecurrentState,
    a_log_of,
    counted,
    empty_state,
    grown,
    short_convolution,
)
from jaxkern.models.products import Matrices
from jaxkern.models.weight_reader import WeightReader


class DeltaNetWeights(NamedTuple):
    """Weights of the layer.

    Attributes:
      input: rows of q, k, v and z, then of b and a, one of each a value head; with
        `by_head` those of a key head side by side in both.
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
    """Sizes of the layer; value_heads / key_heads value heads share a key head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_head: bool = False  # how the products lie: see `DeltaNetWeights`
    gates_by_head: bool = False  # b and a alone lie so
    in_turns: bool = False  # the first value head of each key head, then the second ...

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def empty_state(self, batch: int, slots: int, dtype: CacheForm) -> RecurrentState:
        del slots, dtype  # it does not grow, and small steps need float32
        memory = (self.value_heads, self.key_dim, self.value_dim)
        return empty_state(batch, self.taps - 1, self.channels, memory)

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files, where those have them."""
        n, values = self.value_heads, self.value_heads * self.value_dim
        if self.by_head:
            rows = {"ssm_in": self.channels + values, "ssm_ba": 2 * n}
        else:
            rows = {"attn_qkv": self.channels, "attn_gate": values}
            both = {"ssm_beta": n, "ssm_alpha": n}
            rows |= {"ssm_ba": 2 * n} if self.gates_by_head else both
        return {
            **{f"{name}.weight": (size, d) for name, size in rows.items()},
            "ssm_conv1d.weight": layout.taps(self.channels, self.taps),
            layout.decay: (n,),
            "ssm_dt.bias": (n,),
            "ssm_norm.weight": (self.value_dim,),
            "ssm_out.weight": (d, values),
        }

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> DeltaNetWeights:
        gates = ("ssm_ba",) if self.gates_by_head else ("ssm_beta", "ssm_alpha")
        names = ("attn_qkv", "attn_gate", *gates)
        rows = ("ssm_in", "ssm_ba") if self.by_head else names
        taps = reader.vector(f"{blk}.ssm_conv1d.weight")
        return DeltaNetWeights(
            input=reader.matrices(*(f"{blk}.{name}.weight" for name in rows)),
            convolution=taps if layout.flat_taps else taps[:, 0],
            a_log=self.by_key_head(a_log_of(reader, blk, layout)),
            dt_bias=self.by_key_head(reader.vector(f"{blk}.ssm_dt.bias")),
            norm=reader.vector(f"{blk}.ssm_norm.weight"),
            output=reader.matrices(f"{blk}.ssm_out.weight"),
        )

    def by_key_head(self, x: Float[Array, "..."], axis: int = -1) -> Array:
        """Value heads, along a dim, side by side where they share a key head."""
        if not self.in_turns:
            return x
        x = jnp.moveaxis(x, axis, -1)
        turns = x.reshape(*x.shape[:-1], -1, self.key_heads)
        return jnp.moveaxis(jnp.swapaxes(turns, -1, -2).reshape(x.shape), -1, axis)

    def as_stored(self, x: Float[Array, "..."], axis: int = -1) -> Array:
        """The inverse of `by_key_head`."""
        if not self.in_turns:
            return x
        x = jnp.moveaxis(x, axis, -1)
        heads = x.reshape(*x.shape[:-1], self.key_heads, -1)
        return jnp.moveaxis(jnp.swapaxes(heads, -1, -2).reshape(x.shape), -1, axis)

    def split(
        self, y: Float[Array, "b t f"]
    ) -> tuple[
        Float[Array, "b t c"],
        Float[Array, "b t n*hv"],
        Float[Array, "b t n"],
        Float[Array, "b t n"],
    ]:
        """q, k and v for the convolution, then z, b and a."""
        values = self.value_heads * self.value_dim
        end = self.channels + values
        heads = (*y.shape[:2], self.key_heads, -1)
        if not self.by_head:
            qkv, z, both = jnp.split(y, (self.channels, end), axis=-1)
            return qkv, z, *self.gates(both)
        wide, gates = (part.reshape(heads) for part in jnp.split(y, (end,), axis=-1))
        h, group = self.key_dim, values // self.key_heads
        parts = [
            *jnp.split(wide, (h, 2 * h, 2 * h + group), axis=-1),
            *jnp.split(gates, 2, axis=-1),
        ]
        q, k, v, z, write, rate = (part.reshape(*y.shape[:2], -1) for part in parts)
        return jnp.concatenate([q, k, v], axis=-1), z, write, rate

    def step(
        self,
        config,
        weights: DeltaNetWeights,
        token: tuple[
            Float[Array, "b c"],
            Float[Array, "b n*hv"],
            Float[Array, "b n"],
            Float[Array, "b n"],
        ],
        state: RecurrentState,
        at: Mixing,
    ) -> tuple[Float[Array, "b n hv"], RecurrentState]:
        """One token by one op, from the products to what the last one reads."""
        assert state.memory is not None
        qkv, z, write, rate = token
        gate = z.reshape(-1, self.value_heads, self.value_dim)
        y, inputs, memory = gated_delta_net_step(
            *(qkv, gate, write, rate, weights.convolution, weights.a_log),
            *(weights.dt_bias, weights.norm, state.inputs, state.memory),
            at.new_lengths,
            eps=config.eps,
        )
        lengths = grown(state, y[:, None], at)
        return y, replace(state, inputs=inputs, memory=memory, lengths=lengths)

    def with_drafts(self, state: RecurrentState, t: int) -> DraftedState:
        """The state for calls of t tokens of which not all may stay."""
        assert state.memory is not None
        b, n, h, hv = state.memory.shape
        inputs = self.in_order(state.inputs)
        return DraftedState(
            inputs=jnp.pad(inputs, ((0, 0), (0, t), (0, 0))),
            memory=state.memory,
            keys=jnp.zeros((b, t, n, h), jnp.float32),
            corrections=jnp.zeros((b, t, n, hv), jnp.float32),
            g=jnp.zeros((b, t, n), jnp.float32),
            accepted=jnp.zeros(b, jnp.int32),
            lengths=state.lengths,
        )

    def in_order(self, qkv: Float[Array, "*rows c"]) -> Float[Array, "*rows c"]:
        """The channels of the convolution, value heads as `by_key_head` has them."""
        if not self.in_turns:
            return qkv
        rest, value = jnp.split(qkv, (2 * self.key_heads * self.key_dim,), axis=-1)
        heads = value.reshape(*value.shape[:-1], self.value_heads, self.value_dim)
        heads = self.by_key_head(heads, -2).reshape(value.shape)
        return jnp.concatenate([rest, heads], axis=-1)

    def verify(
        self,
        config,
        weights: DeltaNetWeights,
        tokens: tuple[
            Float[Array, "b t c"],
            Float[Array, "b t n*hv"],
            Float[Array, "b t n"],
            Float[Array, "b t n"],
        ],
        state: DraftedState,
    ) -> tuple[Float[Array, "b t n hv"], DraftedState]:
        """Tokens that do not enter the state yet, behind the accepted ones before."""
        qkv, z, write, rate = tokens
        gate = z.reshape(*z.shape[:2], self.value_heads, self.value_dim)
        found = gated_delta_net_verify(
            *(self.in_order(qkv), self.by_key_head(gate, 2)),
            *(self.by_key_head(write), self.by_key_head(rate)),
            self.in_order(weights.convolution.T).T,
            *(weights.a_log, weights.dt_bias, weights.norm),
            *(state.inputs, state.memory, state.keys, state.corrections, state.g),
            state.accepted,
            eps=config.eps,
        )
        after = replace(
            state,
            inputs=found.inputs,
            memory=found.state,
            keys=found.keys,
            corrections=found.corrections,
            g=found.g,
        )
        return self.as_stored(found.out, 2), after

    def whole(
        self,
        config,
        weights: DeltaNetWeights,
        product: Float[Array, "b t f"],
        at: Mixing,
    ) -> Float[Array, "b t n hv"]:
        """Whole rows without a state, as in training: what the last product reads.

        The product has one gradient, so none of parts are put side by side.
        """
        b, t, _ = product.shape
        query, key, value, z, gates = gated_delta_net_inputs(
            product,
            weights.convolution,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
            gate_columns=self.value_heads * self.value_dim,
            segment_ids=at.segment_ids,
        )
        heads = (b, t, self.value_heads, self.value_dim)
        value, z = (self.by_key_head(a.reshape(heads), 2) for a in (value, z))
        write, rate = (self.by_key_head(a) for a in self.gates(gates))
        g, beta = compute_g_beta(rate, write, weights.a_log, weights.dt_bias)
        y, _ = gated_delta_rule(query, key, value, g, beta, segment_ids=at.segment_ids)
        y = gated_rms_norm(y.reshape(heads), z, weights.norm, eps=config.eps)
        return self.as_stored(y, 2)

    def gates(
        self, both: Float[Array, "b t 2*n"]
    ) -> tuple[Float[Array, "b t n"], Float[Array, "b t n"]]:
        """b and a."""
        if not self.gates_by_head:
            write, rate = jnp.split(both, 2, axis=-1)
            return write, rate
        heads = both.reshape(*both.shape[:2], self.key_heads, -1)
        write, rate = (
            part.reshape(*both.shape[:2], self.value_heads)
            for part in jnp.split(heads, 2, axis=-1)
        )
        return write, rate

    def __call__(
        self,
        config,
        weights: DeltaNetWeights,
        branch: Branch,
        state: RecurrentState | DraftedState | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], RecurrentState | DraftedState | None]:
        b, t, _ = branch.x.shape
        values = self.value_heads * self.value_dim
        product = branch.project(config, weights.input)
        if state is None and not self.by_head:
            y = self.whole(config, weights, product, at).reshape(b, t, values)
            return branch.joined(config, y, weights.output), None
        qkv, z, write, rate = self.split(product)
        if isinstance(state, DraftedState):
            y, state = self.verify(config, weights, (qkv, z, write, rate), state)
            y = y.reshape(b, t, values)
            return branch.joined(config, y, weights.output), state
        if config.fused and state is not None and t == 1 and not self.in_turns:
            token = qkv[:, 0], z[:, 0], write[:, 0], rate[:, 0]
            y, state = self.step(config, weights, token, state, at)
            y = y.reshape(b, t, values)
            return branch.joined(config, y, weights.output), state
        qkv, inputs = short_convolution(
            qkv, weights.convolution, None, state, at, "silu"
        )
        keys = self.key_heads * self.key_dim
        query, key, value = jnp.split(qkv, (keys, 2 * keys), axis=-1)
        query, key = (
            l2_norm(y.reshape(b, t, self.key_heads, self.key_dim)) for y in (query, key)
        )
        by_head = (b, t, self.value_heads, self.value_dim)
        value, z = (self.by_key_head(a.reshape(by_head), 2) for a in (value, z))
        write, rate = self.by_key_head(write), self.by_key_head(rate)
        g, beta = compute_g_beta(rate, write, weights.a_log, weights.dt_bias)
        operands = (query, key, value, g, beta)
        if state is None:
            y, _ = gated_delta_rule(*operands, segment_ids=at.segment_ids)
        else:
            assert state.memory is not None and inputs is not None
            if t == 1:
                g, beta = counted(g, at), counted(beta, at)
                token = (query[:, 0], key[:, 0], value[:, 0], g[:, 0], beta[:, 0])
                y, memory = gated_delta_step(*token, state.memory)
            else:
                y, memory = gated_delta_rule(
                    *operands, state.memory, active_length=at.new_lengths
                )
            state = replace(
                state, inputs=inputs, memory=memory, lengths=grown(state, branch.x, at)
            )
        y = gated_rms_norm(y.reshape(by_head), z, weights.norm, eps=config.eps)
        y = self.as_stored(y, 2)
        return branch.joined(config, y.reshape(b, t, values), weights.output), state
