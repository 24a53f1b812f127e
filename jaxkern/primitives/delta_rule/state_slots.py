"""States of many sequences in one pool, read and written by the numbers of their slots.

What a server holds between the tokens of its requests: `slots` states of any shape, of
which a step of b requests touches b. A number outside [0, slots), -1 as a rule, is a
place of the batch without a request.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def step_in_pool(
    op: str,
    step: Callable,
    b: int,
    pool: Float[Array, "slots ..."],
    state_indices: Int[Array, " b"],
) -> tuple[Float[Array, "b ..."], Float[Array, "slots ..."]]:
    """`step`, which makes (out, states) of b states, on those that the indices name.

    Out is zero where a row has no slot.
    """
    if not jnp.ndim(pool):
        raise TypeError(f"{op}: `state` must be a pool, [slots ...], got shape ().")
    slots = pool.shape[0]
    held = occupied(op, state_indices, b, slots)
    out, rows = step(read_slots(pool, state_indices, held))
    out = jnp.where(held.reshape(-1, *(1,) * (out.ndim - 1)), out, 0)
    return out, write_slots(pool, state_indices, held, rows)


def occupied(
    op: str, state_indices: Int[Array, " b"], b: int, slots: int
) -> Bool[Array, " b"]:
    """Which places of the batch have a slot, or a TypeError that names the op."""
    indices = jnp.asarray(state_indices)
    if indices.shape != (b,) or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"{op}: `state_indices` must be an integer for each of {b} rows, got "
            f"{indices.dtype}{list(indices.shape)}."
        )
    return (indices >= 0) & (indices < slots)


def read_slots(
    pool: Float[Array, "slots ..."],
    state_indices: Int[Array, " b"],
    held: Bool[Array, " b"],
) -> Float[Array, "b ..."]:
    """The state of each row, zeros where it has no slot."""
    if pool.shape[0] == 0:
        return jnp.zeros((len(held), *pool.shape[1:]), pool.dtype)
    rows = jnp.take(pool, jnp.where(held, state_indices, 0), axis=0, mode="clip")
    return jnp.where(held.reshape(-1, *(1,) * (pool.ndim - 1)), rows, 0)


def write_slots(
    pool: Float[Array, "slots ..."],
    state_indices: Int[Array, " b"],
    held: Bool[Array, " b"],
    rows: Float[Array, "b ..."],
) -> Float[Array, "slots ..."]:
    """The pool with the rows in their slots; XLA writes in place what is donated."""
    places = jnp.where(held, state_indices, pool.shape[0])  # behind the end: dropped
    return pool.at[places].set(rows.astype(pool.dtype), mode="drop")
