"""Tokens copied to their slots in an order: rows[i] = x[order[i] // k]."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.embedding import explicit_spec
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def permute_tokens(
    x: Float[Array, "t d"], order: Int32[Array, " r"], k: int
) -> Float[Array, "r d"]:
    """Copies each token to its k slots, sorted as `expert_order` says.

        rows[i] = x[order[i] // k]

    Linear in `x`. The gradient gathers: the k rows of a token are summed in float32 in
    the order of its slots, so every run gives the same bits.

    Args:
      x: `[t, d]`, any float dtype.
      order: `[r]`, a permutation of the r = t * k slots.
      k: slots per token, at least 1.

    Returns:
      rows: `[r, d]`, dtype of x.

    Raises:
      TypeError: `order` has not t * k places.
      ValueError: `k` is less than 1.

    Example:
      >>> order, _ = jaxkern.expert_order(jnp.array([[2, 0], [0, 1]]), 3)
      >>> jaxkern.permute_tokens(jnp.array([[1.0], [2.0]]), order, 2)[:, 0]
      Array([1., 2., 2., 1.], dtype=float32)
    """
    if k < 1:
        raise ValueError(f"permute_tokens: `k` must be at least 1, got {k}.")
    return permute_tokens_p(x, order, k=int(k))


def permute_tokens_reference(
    x: Float[Array, "t d"], order: Int32[Array, " r"], *, k: int
) -> Float[Array, "r d"]:
    if order.size != x.shape[0] * k:
        raise TypeError(
            f"permute_tokens: `order` must have a place for each of {k} slots of "
            f"{x.shape[0]} tokens, got {order.size}."
        )
    return take_rows(x, order // k)


def permute_tokens_bwd_reference(
    order: Int32[Array, " r"], drows: Float[Array, "r d"], *, k: int
) -> Float[Array, "t d"]:
    r, d = drows.shape
    slots = take_rows(at_least_f32(drows), jnp.argsort(order))
    return slots.reshape(r // k, k, d).sum(1).astype(drows.dtype)


def take_rows(x: Float[Array, "t d"], index: Int32[Array, "..."]) -> jax.Array:
    """`x[index]` for indices within bounds; the rows may be cut along d."""
    if x.shape[0] == 0:
        return jnp.zeros((*index.shape, x.shape[1]), x.dtype)
    cuts = (*jax.typeof(index).sharding.spec, jax.typeof(x).sharding.spec[1])
    return x.at[index].get(mode="promise_in_bounds", out_sharding=explicit_spec(*cuts))


permute_tokens_p = kernel_primitive(
    permute_tokens_reference,
    bwd=permute_tokens_bwd_reference,
    linear=("x",),
    replicated=("t", "r"),  # a token's slots may stand anywhere
)
