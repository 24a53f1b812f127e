"""NaN and inf of one sequence of a packed row stay in it.

The chunk forms are products of matrices, in which a decay of 0 stands for what a token
does not see. But 0 * NaN is NaN: a sum over tokens must leave these out, not weigh them
by 0. What is forgotten is what stands before a token whose own decay is 0; that a
product of many decays is too small for its dtype forgets no NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Sees(NamedTuple):
    """What sees what in a chunk, none of the tokens between forgets.

    i and j are tokens, j before i or the same.
    """

    start: jax.Array  # [i], whether i sees the state before the chunk
    tokens: jax.Array  # [i j], whether i sees j
    end: jax.Array  # [j], whether the state behind the chunk sees j


def sight(forgets) -> Sees:
    """Of tokens `[... i]` of which some forget what stands before them."""
    era = lax.cumsum(forgets.astype(jnp.int32), axis=forgets.ndim - 1)
    token = jnp.arange(forgets.shape[-1])
    same = era[..., :, None] == era[..., None, :]
    tokens = same & (token[:, None] >= token)
    return Sees(era == 0, tokens, tokens[..., -1, :])


def finite(x):
    """`x` with 0 for NaN and inf."""
    return jnp.where(jnp.isfinite(x), x, 0)


def all_finite(x):
    """Whether each token, `[... i h]`, has finite numbers alone."""
    return jnp.isfinite(x).all(-1)


def product_of_seen(weights, x, seen):
    """The sums over j of weights_ij x_jv where i sees j, `[i v]`.

    NaN where a number that i sees is not finite: in all columns in which any of the
    chunk is not, that is exactly there unless two sequences of a chunk are broken.
    """
    broken = ~jnp.isfinite(x)
    y = jnp.matmul(weights, jnp.where(broken, 0, x))
    rows = jnp.any(seen & broken.any(-1)[..., None, :], -1)
    return jnp.where(rows[..., None] & broken.any(-2, keepdims=True), jnp.nan, y)
