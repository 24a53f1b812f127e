"""Mamba-2: a state of each channel that decays by head, of Granite 4 and Nemotron-H.

    z, u, dt = x W                       in Falcon-H1 each times a factor of its own
    u, b, c  = silu(conv(u))                 step = clip(softplus(dt + dt_bias))
    y        = state_space_dual(u, step, -exp(a_log), b, c) + skip u
    out      = (rms_norm(y * silu(z)) of each group) O  https://arxiv.org/abs/2405.21060

All channels of a head share step, a and skip; b and c are those of its group. The norm
may be before the gate, or missing.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkern import gated_rms_norm, state_space_dual, swiglu
from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.mixers.mixing import Mixing
from jaxkern.models.mixers.recurrent_state import (
    RecurrentState,
    a_log_of,
    empty_state,
    grown,
    short_convolution,
)
from jaxkern.models.products import Matrices
from jaxkern.models.weight_reader import WeightReader


class Mamba2Weights(NamedTuple):
    """Weights of the layer.

    Attributes:
      input: rows of z, u with b and c, and dt.
      convolution: of u, b and c.
    """

    input: Matrices
    convolution: Float[Array, "c w"]
    convolution_bias: Float[Array, " c"] | None
    a_log: Float[Array, " n"]
    dt_bias: Float[Array, " n"]
    skip: Float[Array, " n"]
    norm: Float[Array, " n*h"] | None
    output: Matrices
    input_bias: Float[Array, " f"] | None = None
    output_bias: Float[Array, " d"] | None = None


@dataclass(frozen=True)
class Mamba2:
    """Sizes of the layer, and the `limits` of the time step.

    Attributes:
      gate: where it is: before the norm, behind it, or alone without one.
      factors: of z, u, b, c and dt, where they leave their product.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    limits: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True
    bias: bool = False  # of the two projections
    gate: Literal["before", "behind", "alone"] = "before"
    factors: tuple[float, ...] | None = None

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: u, b and c side by side."""
        return self.width + 2 * self.groups * self.state_dim

    def empty_state(self, batch: int, slots: int, dtype: CacheForm) -> RecurrentState:
        del slots, dtype  # it does not grow, and small steps need float32
        memory = (self.heads, self.head_dim, self.state_dim)
        return empty_state(batch, self.taps - 1, self.channels, memory)

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files, where those have them."""
        n, wide = self.heads, self.width
        rows = wide + self.channels + n
        found: Shapes = {
            "ssm_in.weight": (rows, d),
            "ssm_conv1d.weight": layout.taps(self.channels, self.taps),
            layout.decay: (n, 1) if layout.rates else (n,),
            "ssm_dt.bias": (n,),
            "ssm_d": (n, 1) if layout.rates else (n,),
            "ssm_out.weight": (d, wide),
        }
        if self.gate != "alone":
            found["ssm_norm.weight"] = layout.groups(self.groups, wide)
        if self.conv_bias:
            found["ssm_conv1d.bias"] = (self.channels,)
        if self.bias:
            found |= {"ssm_in.bias": (rows,), "ssm_out.bias": (d,)}
        return found

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> Mamba2Weights:
        taps = reader.vector(f"{blk}.ssm_conv1d.weight")
        norm = reader.vectors(f"{blk}.ssm_norm.weight")
        return Mamba2Weights(
            input=reader.matrices(f"{blk}.ssm_in.weight"),
            convolution=taps if layout.flat_taps else taps[:, 0],
            convolution_bias=reader.vectors(f"{blk}.ssm_conv1d.bias"),
            a_log=a_log_of(reader, blk, layout),
            dt_bias=reader.vector(f"{blk}.ssm_dt.bias"),
            skip=reader.vector(f"{blk}.ssm_d").reshape(-1),
            norm=None if norm is None else norm.reshape(-1),
            output=reader.matrices(f"{blk}.ssm_out.weight"),
            input_bias=reader.vectors(f"{blk}.ssm_in.bias"),
            output_bias=reader.vectors(f"{blk}.ssm_out.bias"),
        )

    def __call__(
        self,
        config,
        weights: Mamba2Weights,
        branch: Branch,
        state: RecurrentState | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], RecurrentState | None]:
        b, t, _ = branch.x.shape
        y = self.with_factors(branch.project(config, weights.input, weights.input_bias))
        ends = (self.width, self.width + self.channels)
        z, mixed, dt = jnp.split(y, ends, axis=-1)
        convolution = (weights.convolution, weights.convolution_bias)
        mixed, inputs = short_convolution(mixed, *convolution, state, at, "silu")
        grouped = self.groups * self.state_dim
        u, write, read = jnp.split(mixed, (self.width, self.width + grouped), axis=-1)
        write, read = (
            a.reshape(b, t, self.groups, self.state_dim) for a in (write, read)
        )
        step = jax.nn.softplus(dt.astype(jnp.float32) + weights.dt_bias)
        step = jnp.clip(step, *self.limits)
        u = u.reshape(b, t, self.heads, self.head_dim)
        y, memory = state_space_dual(
            u.astype(jnp.float32),
            step,
            -jnp.exp(weights.a_log),
            write,
            read,
            None if state is None else state.memory,
            segment_ids=at.segment_ids,
            active_length=at.new_lengths,
        )
        y = y + weights.skip[:, None] * u
        if state is not None:
            assert inputs is not None
            state = replace(
                state, inputs=inputs, memory=memory, lengths=grown(state, branch.x, at)
            )
        y = self.opened(config, weights, y.reshape(b, t, self.width), z)
        y = y.astype(branch.x.dtype)
        return branch.joined(config, y, weights.output, weights.output_bias), state

    def with_factors(self, y: Float[Array, "b t f"]) -> Float[Array, "b t f"]:
        """The product, its parts times their factors."""
        if self.factors is None:
            return y
        grouped = self.groups * self.state_dim
        sizes = (self.width, self.width, grouped, grouped, self.heads)
        return y * jnp.asarray(np.repeat(self.factors, sizes), y.dtype)

    def opened(
        self,
        config,
        weights: Mamba2Weights,
        y: Float[Array, "b t n*h"],
        z: Float[Array, "b t n*h"],
    ) -> Float[Array, "b t n*h"]:
        """Through the gate, and the norm of each group."""
        if weights.norm is None:
            return swiglu(z.astype(y.dtype), y)
        y, z = (a.reshape(*a.shape[:2], self.groups, -1) for a in (y, z))
        behind = self.gate == "behind"
        y = gated_rms_norm(y, z, eps=config.eps, norm_before_gate=behind)
        return y.reshape(*y.shape[:2], self.width) * weights.norm
