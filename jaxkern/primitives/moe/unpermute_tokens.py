"""Sorted rows put back to their tokens: slots[order[i]] = rows[i]."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.moe.permute_tokens import take_rows


@check_arguments
def unpermute_tokens(
    rows: Float[Array, "r d"], order: Int32[Array, " r"], k: int
) -> Float[Array, "t k d"]:
    """Puts the rows of `permute_tokens` back: to each token its k slots.

        y[order[i] // k, order[i] % k] = rows[i]

    A gather by the inverse order, and so is the gradient. `moe_weighted_reduce` sums
    the slots.

    Args:
      rows: `[r, d]`, any float dtype.
      order: `[r]`, a permutation of the slots, from `expert_order`.
      k: slots per token, at least 1.

    Returns:
      y: `[t, k, d]` with t = r / k, dtype of rows.

    Raises:
      TypeError: r is no multiple of k.
      ValueError: `k` is less than 1.

    Example:
      >>> order, _ = jaxkern.expert_order(jnp.array([[2, 0], [0, 1]]), 3)
      >>> rows = jnp.array([[0.0], [0.0], [1.0], [2.0]])  # what experts 0, 0, 1, 2 gave
      >>> jaxkern.unpermute_tokens(rows, order, 2)[:, :, 0]
      Array([[2., 0.],
             [0., 1.]], dtype=float32)
    """
    if k < 1:
        raise ValueError(f"unpermute_tokens: `k` must be at least 1, got {k}.")
    return unpermute_tokens_p(rows, order, k=int(k))


def unpermute_tokens_reference(
    rows: Float[Array, "r d"], order: Int32[Array, " r"], *, k: int
) -> Float[Array, "t slot d"]:
    r, d = rows.shape
    if r % k:
        raise TypeError(f"unpermute_tokens: {r} rows are no whole tokens of {k} slots.")
    return take_rows(rows, jnp.argsort(order)).reshape(r // k, k, d)


def unpermute_tokens_bwd_reference(
    order: Int32[Array, " r"], dy: Float[Array, "t slot d"], *, k: int
) -> Float[Array, "r d"]:
    del k  # in the shape of dy
    return take_rows(dy.reshape(order.size, dy.shape[-1]), order)


unpermute_tokens_p = kernel_primitive(
    unpermute_tokens_reference,
    bwd=unpermute_tokens_bwd_reference,
    linear=("rows",),
    replicated=("r", "t", "slot"),  # a token's slots may stand anywhere
)
