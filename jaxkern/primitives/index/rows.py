"""Rows by number: to take them, and to add what belongs to the same one."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.index.embedding import explicit_spec


def rows_first(x: Float[Array, "..."], axis: int) -> Float[Array, "... v d"]:
    """x with `axis` as the last dim but one; a last dim gets a 1 behind it."""
    return x[..., None] if axis == x.ndim - 1 else jnp.moveaxis(x, axis, -2)


def rows_back(y: Float[Array, "... v d"], axis: int, ndim: int) -> Float[Array, "..."]:
    """The inverse of rows_first, for an array that had ndim dims."""
    return y[..., 0] if axis == ndim - 1 else jnp.moveaxis(y, -2, axis)


def take_rows(
    x: Float[Array, "... v d"], rows: Int32[Array, " j"]
) -> Float[Array, "... j d"]:
    """x[..., rows, :]; every row is in [0, v)."""
    *lead, _, last = jax.typeof(x).sharding.spec
    spec = explicit_spec(*lead, *jax.typeof(rows).sharding.spec, last)
    return x.at[..., rows, :].get(mode="promise_in_bounds", out_sharding=spec)


def add_rows(
    x: Float[Array, "... v d"],
    rows: Int32[Array, " j"],
    updates: Float[Array, "... j d"],
) -> Float[Array, "... v d"]:
    """x[..., r, :] + the sum of the updates whose row is r, in an order of its own.

    Equal rows are brought together by a stable sort. Then each place adds what stands
    1, 2, 4 ... places before it, where the row there is its own: a sum over twice as
    many places at each step (Hillis and Steele 1986), until the last place of a row has
    all of it. The scatter then adds once to each row: its order, which is free on a
    GPU, does not matter.
    """
    j = rows.shape[0]
    if j == 0:
        return x
    rows, updates = in_one_piece(rows, 0), in_one_piece(updates, -2)
    order = jnp.argsort(rows, stable=True)
    rows, place = rows[order], jnp.arange(j)

    def double(k, sums):
        before = jnp.maximum(place - (1 << k), 0)
        same = (rows == rows[before]) & (place >= 1 << k)
        return sums + jnp.where(same[:, None], take_rows(sums, before), 0)

    steps = (j - 1).bit_length()
    sums = lax.fori_loop(0, steps, double, take_rows(updates, order))
    last = (rows != jnp.roll(rows, -1)) | (place == j - 1)
    target = jnp.where(last, rows, x.shape[-2] + place)  # out of bounds: dropped
    spec = explicit_spec(*jax.typeof(x).sharding.spec)
    return x.at[..., target, :].add(
        sums, mode="drop", unique_indices=True, out_sharding=spec
    )


def in_one_piece(x: Array, axis: int) -> Array:
    """x with `axis` uncut where types say what is cut: a sort needs all of it."""
    spec = list(jax.typeof(x).sharding.spec)
    if spec[axis] is None:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, P(*spec))
