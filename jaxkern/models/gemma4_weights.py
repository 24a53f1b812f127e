"""Weights of a Gemma 4 model, and the sizes of its heads."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxkern.models.gemma4_experts import Gemma4Experts
from jaxkern.models.products import Matrices, Table


@dataclass(frozen=True)
class Heads:
    """Of the layers with a window, or of the others."""

    kv_heads: int
    head_dim: int
    theta: float
    rotated_pairs: int  # the first of a head's
    keys_as_values: bool = False


class Gemma4Layer(NamedTuple):
    """Weights of one layer; None for what it does not have."""

    attention_norm: Float[Array, " d"]
    qkv: Matrices  # q, k and v; q and k where keys are values; or q
    q_norm: Float[Array, " h"]
    k_norm: Float[Array, " h"] | None
    attention_output: Matrices
    attention_post_norm: Float[Array, " d"]
    ffn_norm: Float[Array, " d"]
    gate_up: Matrices
    down: Matrices
    ffn_post_norm: Float[Array, " d"]
    input_gate: Matrices | None
    input_projection: Matrices | None
    input_post_norm: Float[Array, " d"] | None
    scalar: Float[Array, "1"]
    experts: Gemma4Experts | None = None


class Gemma4Weights(NamedTuple):
    """Weights of a model; the three of the inputs of layers are None without these."""

    embedding: Table
    layers: tuple[Gemma4Layer, ...]
    output_norm: Float[Array, " d"]
    output: Matrices
    input_table: Table | None
    input_context: Matrices | None
    input_norm: Float[Array, " p"] | None
