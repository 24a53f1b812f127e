"""Orders of a sequence over devices: in runs, or zigzag, which balances causal work."""

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

from jaxkern.parallel.mesh_axis import check_axis, is_bound
from jaxkern.primitives.check_arguments import check_arguments

Order = Literal["contiguous", "zigzag"]


@check_arguments
def zigzag(
    x: Shaped[Array, "..."], parts: int, *, axis: int = 1, back: bool = False
) -> Shaped[Array, "..."]:
    """Reorders a sequence so that each of n parts has as much causal work as any other.

    Of 2 n blocks of equal length part i gets blocks i and 2 n - 1 - i: one whose rows
    see few keys and one whose rows see many. Reorder the tokens once, before the
    embedding, and what belongs to them (labels, positions, segment ids) with them.

    Args:
      x: any array with a dim of t rows, t a multiple of 2 n.
      parts: n, the number of devices that the sequence is cut over.
      axis: which dim has the rows.
      back: undoes it.

    Returns:
      x with its rows in the other order.

    Raises:
      ValueError: `axis` is none of x, `parts` is below 1, or 2 n does not divide t.

    Example:
      >>> jaxkern.zigzag(jnp.arange(8), 2, axis=0)
      Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"zigzag: `axis` must name one of the {x.ndim} dims, got {axis}."
        )
    axis %= x.ndim
    t = x.shape[axis]
    if parts < 1 or t % (2 * parts):
        raise ValueError(
            f"zigzag: `parts` is {parts} and there are {t} rows. It counts devices, 1 "
            "or more, and each gets two blocks of equal length."
        )
    first = np.arange(parts)
    order = np.stack([first, 2 * parts - 1 - first], axis=1).reshape(-1)
    if back:
        order = np.argsort(order)
    blocks = x.reshape(*x.shape[:axis], 2 * parts, -1, *x.shape[axis + 1 :])
    return jnp.take(blocks, order, axis=axis).reshape(x.shape)


@check_arguments
def sequence_positions(
    length: int, *, axis_name: str, order: Order = "contiguous"
) -> Int32[Array, " t"]:
    """Where the rows of this device stand in a sequence cut over a mesh axis.

    Called inside `shard_map`, for rotary embeddings and the like: device i of n holds
    rows i t to (i + 1) t - 1, or its two blocks of `zigzag`.

    Args:
      length: t, the rows of this device.
      axis_name: the mesh axis that cuts the sequence.
      order: "contiguous" or "zigzag".

    Returns:
      positions: `[t]`, int32.

    Raises:
      TypeError: an argument is not of its kind.
      ValueError: `order` is neither, the axis is not bound, or t is odd with "zigzag".

    Example:
      >>> auto, cut = (jax.sharding.AxisType.Auto,), jax.P("x")
      >>> mesh = jax.make_mesh((1,), ("x",), auto)
      >>> f = lambda x: x + jaxkern.sequence_positions(len(x), axis_name="x")
      >>> jax.shard_map(f, mesh=mesh, in_specs=cut, out_specs=cut)(jnp.zeros(3, int))
      Array([0, 1, 2], dtype=int32)
    """
    check_axis("sequence_positions", axis_name)
    check_order("sequence_positions", order)
    if not is_bound(axis_name):
        raise ValueError(
            f"sequence_positions: no axis {axis_name!r} here. Call it inside "
            "jax.shard_map; outside, the positions are those of the whole sequence."
        )
    i, n = lax.axis_index(axis_name), lax.axis_size(axis_name)
    rows = jnp.arange(length, dtype=jnp.int32)
    if order == "contiguous":
        return i * length + rows
    if length % 2:
        raise ValueError(
            f"sequence_positions: {length} rows are not two blocks, as `zigzag` has."
        )
    half = length // 2
    first, second = i * half, (2 * n - 1 - i) * half
    return jnp.where(rows < half, first + rows, second + rows - half)


def check_order(op: str, order: str) -> None:
    if order not in get_args(Order):
        raise ValueError(
            f"{op}: `order` must be 'contiguous' or 'zigzag', got {order!r}."
        )
