"""What every kind of layer is given beside its input and weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxkern import rope_cos_sin
from jaxkern.primitives.rope.rope_frequencies import RopeScaling


@dataclass(frozen=True)
class Rotation:
    """Which dims of a head rotate, and how fast."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class QueryGrowth:
    """Queries that grow with their position, by 1 + beta log(1 + floor(at / length)).

    So that scores over texts longer than the original context stay as sharp
    (https://arxiv.org/abs/2501.19399).
    """

    beta: float
    length: int

    def __call__(
        self, q: Float[Array, "b t n h"], at: Int32[Array, "b t"]
    ) -> Float[Array, "b t n h"]:
        """The queries of the tokens that stand at these positions."""
        factor = 1 + self.beta * jnp.log1p((at // self.length).astype(jnp.float32))
        return q * factor[..., None, None].astype(q.dtype)


Tables = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]


class Mixing(NamedTuple):
    """Where the tokens stand.

    Attributes:
      new_lengths: how many of the t tokens count, or None for all.
      segment_ids: of texts packed in a row, without a cache.
      tables: cos and sin of every rotation that the model has.
      positions: of the tokens in their texts.
    """

    new_lengths: Int[Array, " b"] | None
    segment_ids: Int[Array, "b t"] | None
    tables: Mapping[Rotation, Tables]
    positions: Int32[Array, "b t"]


def rotation_tables(
    rotations: set[Rotation], at: Int32[Array, "b t"]
) -> Mapping[Rotation, Tables]:
    """cos and sin of each; computed once, not in every layer."""
    return {
        rotation: lax.optimization_barrier(
            rope_cos_sin(
                at, rotation.dim, theta=rotation.theta, scaling=rotation.scaling
            )
        )
        for rotation in rotations
    }
