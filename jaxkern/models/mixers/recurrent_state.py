"""What a recurrent layer keeps of the tokens before: a sum, and its last inputs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxkern import causal_conv1d, causal_conv1d_step
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.mixing import Mixing
from jaxkern.models.weight_reader import WeightReader


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """The state of b sequences, float32: many small steps add up in it.

    Attributes:
      inputs: `[b, past, d]`, the last inputs of the short convolution.
      memory: what the recurrence carries, its shape that of the layer; None where the
        convolution is all there is.
      lengths: `[b]` int32, tokens that each sequence has had.
    """

    inputs: Float[Array, "b past d"]
    memory: Float[Array, "b ..."] | None
    lengths: Int32[Array, " b"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenCount:
    """What a layer without a mixer keeps: `[b]` int32, tokens of each sequence."""

    lengths: Int32[Array, " b"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftedState:
    """A `RecurrentState` before some tokens of which it is not known yet which stay.

    See `jaxkern.gated_delta_net_verify`, which adds those that do.

    Attributes:
      inputs: `[b, past + t, d]`, the inputs before these tokens, and theirs.
      memory: before these tokens.
      keys, corrections, g: what each of them adds to it.
      accepted: how many stay.
      lengths: with those that stay.
    """

    inputs: Float[Array, "b rows d"]
    memory: Float[Array, "b n h hv"]
    keys: Float[Array, "b t n h"]
    corrections: Float[Array, "b t n hv"]
    g: Float[Array, "b t n"]
    accepted: Int32[Array, " b"]
    lengths: Int32[Array, " b"]


def empty_state(
    batch: int, past: int, channels: int, memory: tuple[int, ...] | None
) -> RecurrentState:
    """Zeros, as before the first token."""
    return RecurrentState(
        inputs=jnp.zeros((batch, past, channels), jnp.float32),
        memory=None if memory is None else jnp.zeros((batch, *memory), jnp.float32),
        lengths=jnp.zeros(batch, jnp.int32),
    )


def a_log_of(reader: WeightReader, blk: str, layout: Layout) -> Float[Array, " n"]:
    """The logarithm of how fast each head's memory decays.

    Raises:
      ValueError: of the file's kind: rates of a GGUF file that are not negative.
    """
    found = reader.vector(f"{blk}.{layout.decay}").reshape(-1)
    if not layout.rates:
        return found
    if not (found < 0).all():
        raise reader.file.error(f"tensor {blk}.{layout.decay} has a rate above 0")
    return jnp.log(-found)


def short_convolution(
    x: Float[Array, "b t d"],
    weight: Float[Array, "d w"],
    bias: Float[Array, " d"] | None,
    state: RecurrentState | None,
    at: Mixing,
    activation,
) -> tuple[Float[Array, "b t d"], Float[Array, "b past d"] | None]:
    """`causal_conv1d` behind the state's inputs, and the inputs for what follows."""
    if state is None:
        y, _ = causal_conv1d(
            x, weight, bias, segment_ids=at.segment_ids, activation=activation
        )
        return y, None
    if x.shape[1] == 1:
        token = (x[:, 0], weight, bias, state.inputs)
        y, inputs = causal_conv1d_step(*token, activation=activation)
        if at.new_lengths is not None:
            kept = (at.new_lengths > 0)[:, None, None]
            inputs = jnp.where(kept, inputs, state.inputs)
        return y[:, None], inputs
    return causal_conv1d(
        x,
        weight,
        bias,
        state.inputs,
        active_length=at.new_lengths,
        activation=activation,
    )


def counted(x: Float[Array, "b t *rest"], at: Mixing) -> Float[Array, "b t *rest"]:
    """x with zeros for the tokens that do not count."""
    if at.new_lengths is None:
        return x
    counts = jnp.arange(x.shape[1]) < at.new_lengths[:, None]
    return jnp.where(counts.reshape(*counts.shape, *(1,) * (x.ndim - 2)), x, 0)


def grown(
    state: RecurrentState | TokenCount, x: Float[Array, "b t d"], at: Mixing
) -> Int32[Array, " b"]:
    """The lengths behind the t tokens, as far as they count."""
    return state.lengths + (x.shape[1] if at.new_lengths is None else at.new_lengths)
