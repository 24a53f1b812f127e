"""Gated short convolution of LFM2: a few tokens back, each channel by its own taps.

b, c, u = x W
out     = (c * conv(b * u)) O
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.mixers.mixing import Mixing
from jaxkern.models.mixers.recurrent_state import (
    RecurrentState,
    empty_state,
    grown,
    short_convolution,
)
from jaxkern.models.products import Matrices
from jaxkern.models.weight_reader import WeightReader


class ShortConvWeights(NamedTuple):
    """Weights of the layer; all three biases or none."""

    input: Matrices
    convolution: Float[Array, "d w"]
    output: Matrices
    input_bias: Float[Array, " 3*d"] | None = None
    convolution_bias: Float[Array, " d"] | None = None
    output_bias: Float[Array, " d"] | None = None


@dataclass(frozen=True)
class ShortConv:
    """Sizes of the layer."""

    channels: int
    taps: int
    bias: bool = False

    def empty_state(self, batch: int, slots: int, dtype: CacheForm) -> RecurrentState:
        del slots, dtype
        return empty_state(batch, self.taps - 1, self.channels, None)

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files."""
        taps = (d, self.taps) if layout.flat_taps else (d, 1, self.taps)
        found: Shapes = {
            "shortconv.in_proj.weight": (3 * d, d),
            "shortconv.conv.weight": taps,
            "shortconv.out_proj.weight": (d, d),
        }
        if self.bias:
            sizes = {"in_proj": 3 * d, "conv": d, "out_proj": d}
            found |= {f"shortconv.{n}.bias": (size,) for n, size in sizes.items()}
        return found

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> ShortConvWeights:
        at = f"{blk}.shortconv"
        taps = reader.vector(f"{at}.conv.weight")
        return ShortConvWeights(
            input=reader.matrices(f"{at}.in_proj.weight"),
            convolution=taps.reshape(self.channels, self.taps),
            output=reader.matrices(f"{at}.out_proj.weight"),
            input_bias=reader.vectors(f"{at}.in_proj.bias"),
            convolution_bias=reader.vectors(f"{at}.conv.bias"),
            output_bias=reader.vectors(f"{at}.out_proj.bias"),
        )

    def __call__(
        self,
        config,
        weights: ShortConvWeights,
        branch: Branch,
        state: RecurrentState | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], RecurrentState | None]:
        y = branch.project(config, weights.input, weights.input_bias)
        before, behind, u = jnp.split(y, 3, axis=-1)
        y, inputs = short_convolution(
            before * u, weights.convolution, weights.convolution_bias, state, at, None
        )
        if state is not None:
            assert inputs is not None
            state = replace(state, inputs=inputs, lengths=grown(state, branch.x, at))
        output = weights.output, weights.output_bias
        return branch.joined(config, behind * y, *output), state
