"""A residual branch: what a block reads, and how its result comes back.

    x + scale * f(rms_norm(x))

The first products of f take in the norm and its last one the addition, where the
weights' container has a kernel that does.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern import branched_rms_norm, rms_norm
from jaxkern.models.products import Matrices, Numerics, gated, plus, project


class Branch(NamedTuple):
    """Where a branch begins.

    Attributes:
      reads: what its products read.
      norm: which they are still to make of it, or None.
      x: what the result is added to.
      scale: of the result.
    """

    reads: Float[Array, "b t d"]
    norm: Float[Array, " d"] | None
    x: Float[Array, "b t d"]
    scale: float = 1.0

    @classmethod
    def begin(
        cls,
        config: Numerics,
        x: Float[Array, "b t d"],
        norm: Float[Array, " d"] | None,
        state: Any,
        scale: float = 1.0,
    ) -> "Branch":
        """Without a state, so in training, the norm is made here.

        Its gradient is then added to that of x in one pass.
        """
        if norm is None or state is not None:
            return cls(x, norm, x, scale)
        y, x = branched_rms_norm(x, norm, eps=config.eps)
        return cls(y, None, x, scale)

    def normalised(self, config: Numerics) -> "Branch":
        """The norm made, for what reads it more than once or without a product."""
        if self.norm is None:
            return self
        y = rms_norm(self.reads, self.norm, eps=config.eps)
        return self._replace(reads=y, norm=None)

    def project(
        self,
        config: Numerics,
        matrices: Matrices,
        bias: Float[Array, " f"] | None = None,
    ) -> Float[Array, "b t f"]:
        """What it reads times the matrices + bias."""
        return project(config, self.reads, matrices, self.norm, bias=bias)

    def gated(
        self, config: Numerics, gate_up: Matrices, alpha: float = 1.0
    ) -> Float[Array, "b t f"]:
        """gate * sigmoid(alpha gate) * up of what it reads."""
        return gated(config, self.reads, gate_up, self.norm, alpha=alpha)

    def scaled(self, scale: float) -> "Branch":
        """The same, its result times another factor."""
        return self._replace(scale=self.scale * scale)

    def joined(
        self,
        config: Numerics,
        y: Float[Array, "b t f"],
        matrices: Matrices,
        bias: Float[Array, " d"] | None = None,
    ) -> Float[Array, "b t d"]:
        """x + scale * (y times the matrices + bias)."""
        if self.scale == 1.0:
            return project(config, y, matrices, residual=self.x, bias=bias)
        return self.added(plus(project(config, y, matrices), bias))

    def added(self, y: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """x + scale * y."""
        if self.scale == 1.0:
            return self.x + y
        return self.x + y * jnp.asarray(self.scale, self.x.dtype)
