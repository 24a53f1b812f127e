"""What attention takes and gives, by name: for its references and for every kernel."""

from typing import NamedTuple, TypedDict

from jaxtyping import Array, Bool, Float, Int


class AttentionOperands(NamedTuple):
    """In the order of `attention_p`; those that are absent are None."""

    query: Float[Array, "b t k*g h"]
    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k hv"]
    bias: Float[Array, "#b #k*g #t #s"] | None = None
    mask: Bool[Array, "#b #k*g #t #s"] | None = None
    q_segment_ids: Int[Array, "b t"] | None = None  # both or neither
    kv_segment_ids: Int[Array, "b s"] | None = None
    kv_lengths: Int[Array, " b"] | None = None
    q_offset: Int[Array, " b"] | None = None
    sinks: Float[Array, " k*g"] | None = None


class AttentionGradients(NamedTuple):
    """One for each float operand; None for an absent one."""

    query: Float[Array, "b t k*g h"]
    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k hv"]
    bias: Float[Array, "#b #k*g #t #s"] | None
    sinks: Float[Array, " k*g"] | None


class AttentionOptions(TypedDict):
    """As `checked_visibility` leaves them: a window of two numbers is one."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
