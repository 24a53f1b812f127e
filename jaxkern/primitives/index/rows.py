"""Rows by number: to take them, and to sum what belongs to the same one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.index.embedding import explicit_spec


def axis_within(op: str, axis: int, ndim: int) -> int:
    """`axis` counted from the front, or a ValueError that names the op."""
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{op}: `axis` must name one of the {ndim} dims of `x`, got {axis}."
        )
    return axis % ndim


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


def sum_rows(
    updates: Float[Array, "... j d"], rows: Int32[Array, " j"], v: int
) -> Float[Array, "... v d"]:
    """y[..., r, :] = the sum of the updates whose row is r, in an order of its own.

    Equal rows are brought together by a stable sort. Then each place adds what stands
    1, 2, 4 ... places before it, where the row there is its own: a sum over twice as
    many places at each step (Hillis and Steele 1986), and the last place of a row has
    all of it. No float is added by a scatter, whose order is free on a GPU.
    """
    j = rows.shape[0]
    if j == 0:
        return jnp.zeros((*updates.shape[:-2], v, updates.shape[-1]), updates.dtype)
    order = jnp.argsort(rows, stable=True)
    rows, sums, place = rows[order], take_rows(updates, order), jnp.arange(j)
    for step in (2**k for k in range((j - 1).bit_length())):
        same = (rows == jnp.roll(rows, step)) & (place >= step)
        before = jnp.roll(sums, step, axis=-2)
        sums = sums + jnp.where(same[:, None], before, 0)
    ends = jnp.searchsorted(rows, jnp.arange(v), side="right", method="scan_unrolled")
    last = jnp.maximum(ends - 1, 0)
    present = rows[last] == jnp.arange(v)
    return jnp.where(present[:, None], take_rows(sums, last), 0)
