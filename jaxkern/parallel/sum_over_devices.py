"""The sum of what the devices of a mesh axis have, on each of them.

    y = residual + sum over devices of x

A part of a product's sum becomes the whole, as in Megatron-LM
(https://arxiv.org/abs/1909.08053). It is one all-reduce in float32; where launches are
in chains and the GPUs reach each other's memory it is a kernel of the chain
(`jaxkern/gpu/peer_sum.py`).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.parallel.mesh_axis import check_axis, is_bound
from jaxkern.primitives.check_arguments import check_arguments

NAME = "sum_over_devices"  # by which `lowering/chained.py` knows the equation


@check_arguments
def sum_over_devices(
    x: Float[Array, "*shape"],
    residual: Float[Array, "*shape"] | None = None,
    *,
    axis_name: str,
) -> Float[Array, "*shape"]:
    """The sum of x over the devices of a mesh axis, inside `shard_map`.

        y = residual + sum over devices of x

    Source: https://arxiv.org/abs/1909.08053.

    Args:
      x: this device's part, of any shape.
      residual: the same on all devices; None adds nothing.
      axis_name: the mesh axis.

    Returns:
      y, the same on all devices, in the dtype of `residual`, or of x without one. Sums
      are float32, or float64 where an operand is.

    Raises:
      TypeError: an `axis_name` that is no text.
      ValueError: outside of `shard_map` over that axis.

    Example:
      >>> mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
      >>> add = jax.shard_map(
      ...     lambda x: jaxkern.sum_over_devices(x, axis_name="x"),
      ...     mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P(),
      ... )
      >>> add(jnp.array([1.0, 2.0]))
      Array([1., 2.], dtype=float32)
    """
    check_axis(NAME, axis_name)
    if not is_bound(axis_name):
        raise ValueError(
            f"{NAME}: no axis {axis_name!r} here. Call it inside jax.shard_map over it."
        )
    return marked(x, residual, axis_name)


def added_up(x: Array, residual: Array | None, axis_name: str) -> Array:
    like = x if residual is None else residual
    total = lax.psum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis_name)
    return (total if residual is None else total + residual).astype(like.dtype)


added_up.__name__ = NAME  # of the equation
marked = jax.jit(added_up, static_argnums=2)
