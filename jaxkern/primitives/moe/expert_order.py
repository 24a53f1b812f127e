"""The stable order that sorts routed tokens by expert, with the size of each group."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Integer

from jaxkern.primitives.check_arguments import check_arguments


@check_arguments
def expert_order(
    ids: Integer[Array, "..."], num_experts: int
) -> tuple[Int32[Array, " r"], Int32[Array, " e"]]:
    """Sorts the slots of `ids` by expert; nothing is dropped, ties keep their order.

        order = argsort(ids, stable),    group_sizes[e] = how many ids are e

    An id outside `[0, num_experts)` sorts behind all experts and counts for none. So a
    device that holds a run of the experts passes `ids - first`, and `grouped_matmul`
    gives zeros for the others.

    Args:
      ids: `[..., k]`, any integer dtype, read as r slots in row-major order.
      num_experts: e.

    Returns:
      order: `[r]`, int32: the i-th sorted slot is slot `order[i]`.
      group_sizes: `[e]`, int32, how many slots each expert has.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> ids = jnp.array([[2, 0], [0, 1]])  # two experts for each of two tokens
      >>> order, group_sizes = jaxkern.expert_order(ids, 3)
      >>> order, group_sizes
      (Array([1, 2, 3, 0], dtype=int32), Array([2, 1, 1], dtype=int32))
    """
    slots = ids.reshape(-1)
    slots = slots.astype(jnp.promote_types(slots.dtype, jnp.int32))
    inside = (slots >= 0) & (slots < num_experts)
    expert = jnp.where(inside, slots, num_experts).astype(jnp.int32)
    group_sizes = (expert[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    return jnp.argsort(expert, stable=True).astype(jnp.int32), group_sizes
