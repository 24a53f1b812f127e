"""The best keys of each query by their scores, as `sparse_attention` reads them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.top_k import top_k


@check_arguments
def select_keys(scores: Float[Array, "... s"], k: int) -> Int32[Array, "... k"]:
    """The numbers of the k keys, or blocks of keys, with the largest scores.

        indices = top_k(scores, k)[1], and -1 where the score is -inf

    -inf is the score of what a query may not see: behind the length of its cache, after
    its own position, masked. A row that sees fewer than k has -1 in the other places,
    also where s itself is below k. The choice has no gradient; that of `indexer_scores`
    is trained by a loss on the scores.

    What is always to be read gets the largest score: `scores.at[..., 0].set(jnp.inf)`
    keeps the first block.

    Args:
      scores: `[..., s]`, any float dtype, such as of `indexer_scores`. NaN counts as
        larger than inf.
      k: how many, 0 or more.

    Returns:
      int32 `[..., k]`, by descending score, no number twice, -1 last.

    Raises:
      TypeError: scores have no dims, or no float dtype.
      ValueError: k is negative.

    Example:
      >>> scores = jnp.array([[0.5, 2.0, 1.0, -jnp.inf], [3.0, *[-jnp.inf] * 3]])
      >>> jaxkern.select_keys(scores, 2)
      Array([[ 1,  2],
             [ 0, -1]], dtype=int32)
    """
    if scores.ndim == 0:
        raise TypeError("select_keys: `scores` must have dims [..., s], got shape ().")
    if k < 0:
        raise ValueError(f"select_keys: `k` must be 0 or more, got {k}.")
    found = min(k, scores.shape[-1])
    values, indices = top_k(lax.stop_gradient(scores), found)
    indices = jnp.where(values == -jnp.inf, -1, indices)
    missing = [(0, 0)] * (scores.ndim - 1) + [(0, k - found)]
    return jnp.pad(indices, missing, constant_values=-1)
