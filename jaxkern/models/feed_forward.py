"""What stands between the mixings of tokens: a gated block, or a choice of them.

    dense(x)   = down (silu(gate x) * (up x))
    experts(x) = sum over the k best experts e of w_e expert_e(x), w = route(router x)
                 + shared(x), times sigmoid(x . shared_gate) where there is one
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern import linear, moe_ffn, route, sigmoid_gate, swiglu
from jaxkern.models.llama import Matrices, project
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

Experts = Float[Array, "e f d"] | QuantizedTensor


class DenseWeights(NamedTuple):
    """Rows of gate and up, and what goes back."""

    gate_up: Matrices
    down: Matrices


@dataclass(frozen=True)
class Dense:
    """A gated block for every token."""

    def __call__(
        self, config, weights: DenseWeights, x: Float[Array, "b t d"]
    ) -> Float[Array, "b t d"]:
        gate, up = jnp.split(project(config, x, weights.gate_up), 2, axis=-1)
        return project(config, swiglu(gate, up), weights.down)


class MixtureWeights(NamedTuple):
    """None for what the architecture does not have.

    Attributes:
      router: float32, whatever the others are: rounded, it would choose other experts.
      correction: of the scores, for the choice alone.
      shared: a block that every token passes beside its experts.
    """

    router: Float[Array, "e d"]
    gate: Experts
    up: Experts
    down: Experts
    router_bias: Float[Array, " e"] | None = None
    correction: Float[Array, " e"] | None = None
    gate_bias: Float[Array, "e f"] | None = None
    up_bias: Float[Array, "e f"] | None = None
    down_bias: Float[Array, "e d"] | None = None
    shared: DenseWeights | None = None
    shared_gate: Float[Array, "1 d"] | None = None


@dataclass(frozen=True)
class Mixture:
    """The options of `route` and, of the experts' gate, of `swiglu`."""

    chosen: int
    score: str = "softmax"
    normalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scaling_factor: float = 1.0
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __call__(
        self, config, weights: MixtureWeights, x: Float[Array, "b t d"]
    ) -> Float[Array, "b t d"]:
        scores = linear(x.astype(jnp.float32), weights.router, weights.router_bias)
        by_expert, ids = route(
            scores,
            self.chosen,
            score=self.score,
            normalize=self.normalize,
            correction_bias=weights.correction,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
            scaling_factor=self.scaling_factor,
        )
        y = moe_ffn(
            x,
            ids,
            by_expert.astype(x.dtype),
            weights.gate,
            weights.up,
            weights.down,
            weights.gate_bias,
            weights.up_bias,
            weights.down_bias,
            alpha=self.alpha,
            limit=self.limit,
            up_offset=self.up_offset,
        )
        if weights.shared is None:
            return y
        shared = Dense()(config, weights.shared, x)
        if weights.shared_gate is not None:
            opening = linear(x, weights.shared_gate.astype(x.dtype))
            shared = sigmoid_gate(shared, jnp.broadcast_to(opening, shared.shape))
        return y + shared
