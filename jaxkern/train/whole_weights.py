"""FSDP: each device keeps a part of every weight, and reads them whole."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def whole_weights(loss_fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`loss_fn` for weights that are cut over the devices that have the rows.

    Of a product of cut weights with cut rows XLA may move either, and of some it moves
    the rows, several times. Here each weight is gathered once, and of its gradient each
    device gets its part of the sum: all that FSDP (https://arxiv.org/abs/2304.11277)
    moves. A device holds the weights whole while it computes, in the dtype that the
    loss reads, and its parts of the gradients and of the optimiser's state.

    Args:
      loss_fn: (weights, ...) to a loss, as `train_step` takes it.
      mesh: the devices.

    Returns:
      The same function of cut weights, which are a tree of arrays.

    Raises:
      ValueError: an axis of the mesh is not automatic.

    Example:
      >>> mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
      >>> loss = jaxkern.train.whole_weights(lambda w, x: jnp.sum(w["a"] * x), mesh)
      >>> float(jax.jit(loss)({"a": jnp.arange(3.0)}, jnp.ones(3)))
      3.0
    """
    if set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"whole_weights: `mesh` must have automatic axes, got {mesh}. Pass "
            "jax.make_mesh the axis types jax.sharding.AxisType.Auto."
        )
    whole = NamedSharding(mesh, P())

    def loss(weights: Any, *others: Any) -> Any:
        return loss_fn(jax.lax.with_sharding_constraint(weights, whole), *others)

    return loss
