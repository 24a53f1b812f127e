"""What every kind of layer is given beside its input and weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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


Tables = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]


class Mixing(NamedTuple):
    """Where the tokens stand.

    Attributes:
      new_lengths: how many of the t tokens count, or None for all.
      segment_ids: of texts packed in a row, without a cache.
      tables: cos and sin of every rotation that the model has.
    """

    new_lengths: Int[Array, " b"] | None
    segment_ids: Int[Array, "b t"] | None
    tables: Mapping[Rotation, Tables]


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
