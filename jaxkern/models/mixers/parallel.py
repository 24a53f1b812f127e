"""Attention and Mamba-2 beside each other, of Falcon-H1: both read the same.

x + a * attention(y) + m * mamba2(y),  y = rms_norm(x)
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int32

from jaxkern import KVCache
from jaxkern.models.architecture import CacheForm
from jaxkern.models.branch import Branch
from jaxkern.models.mixers.full_attention import AttentionWeights, FullAttention
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.mixers.mamba2 import Mamba2, Mamba2Weights
from jaxkern.models.mixers.mixing import Mixing, Rotation
from jaxkern.models.mixers.recurrent_state import RecurrentState
from jaxkern.models.weight_reader import WeightReader


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ParallelState:
    """What both keep; how many tokens they have read stands here alone."""

    attention: KVCache
    recurrent: RecurrentState
    lengths: Int32[Array, " b"]

    @classmethod
    def of(cls, attention: KVCache, recurrent: RecurrentState) -> "ParallelState":
        """The two, which have read the same."""
        bare: dict[str, Any] = {"lengths": None}
        both = replace(attention, **bare), replace(recurrent, **bare)
        return cls(*both, recurrent.lengths)


class ParallelWeights(NamedTuple):
    """Weights of both."""

    attention: AttentionWeights
    recurrent: Mamba2Weights


@dataclass(frozen=True)
class Parallel:
    """Both, and the factors of what they give."""

    attention: FullAttention
    recurrent: Mamba2
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def rotation(self) -> Rotation | None:
        return self.attention.rotation

    def empty_state(self, batch: int, slots: int, dtype: CacheForm) -> ParallelState:
        return ParallelState.of(
            self.attention.empty_state(batch, slots, dtype),
            self.recurrent.empty_state(batch, slots, dtype),
        )

    def tensors(self, d: int, layout: Layout) -> Shapes:
        """By their names in GGUF files."""
        return self.attention.tensors(d, layout) | self.recurrent.tensors(d, layout)

    def read(self, reader: WeightReader, blk: str, layout: Layout) -> ParallelWeights:
        return ParallelWeights(
            self.attention.read(reader, blk, layout),
            self.recurrent.read(reader, blk, layout),
        )

    def __call__(
        self,
        config,
        weights: ParallelWeights,
        branch: Branch,
        state: ParallelState | None,
        at: Mixing,
    ) -> tuple[Float[Array, "b t d"], ParallelState | None]:
        keys = memory = None
        if state is not None:
            keys = replace(state.attention, lengths=state.lengths)
            memory = replace(state.recurrent, lengths=state.lengths)
        branch = branch.normalised(config)
        first, second = map(branch.scaled, self.scales)
        y, keys = self.attention(config, weights.attention, first, keys, at)
        second = second._replace(x=y)
        y, memory = self.recurrent(config, weights.recurrent, second, memory, at)
        if keys is None or memory is None:
            return y, None
        return y, ParallelState.of(keys, memory)
