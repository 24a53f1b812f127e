"""NaN and inf of one sequence of a packed row stay in it.

The chunk forms are products of matrices, in which a decay of 0 stands for what a token
does not see. But 0 * NaN is NaN: a sum over tokens must leave these out, not weigh them
by 0. What is forgotten is what stands before a token whose own decay is 0; that a
product of many decays is too small for its dtype forgets no NaN.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def seen(which, x):
    """`x` where it is seen, else 0, whatever it is there; None: all of it is seen."""
    return x if which is None else jnp.where(which, x, 0)


def rows_seen(which, x):
    """The same of `x` `[i ...]` by its rows."""
    return x if which is None else jnp.where(which[..., None], x, 0)


def told(broken, x):
    """NaN in broken rows of `x` `[i v]`; None: there are none."""
    return x if broken is None else jnp.where(broken[..., None], jnp.nan, x)


def turned(seen):
    """Which j sees i, of which i sees j."""
    return None if seen is None else jnp.swapaxes(seen, -1, -2)


FINITE = ("query", "key", "beta")  # whose NaN goes to the value of its token


class Sees(NamedTuple):
    """What sees what in a chunk, none of the tokens between forgets.

    i and j are tokens, j before i or the same. None is for all, as far as one asks.
    """

    start: Any  # [i], whether i sees the state before the chunk
    tokens: Any  # [i j], whether i sees j
    end: Any  # [j], whether the state behind the chunk sees j


ALL = Sees(None, None, None)  # of a row that holds one sequence


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


class Finite(NamedTuple):
    """Operands of which queries, keys, g and beta are finite, and what they were.

    A token whose key, g or beta is not has NaN for its value: it writes NaN, so what
    is read of it in its sequence is NaN as well, and nothing else. All is finite, as
    far as one asks, in a row of one sequence, where both others are None.
    """

    chunks: Any
    broken_query: jax.Array | None  # [b c k 1 i], its result is NaN
    broken_token: jax.Array | None  # [b c k g i]


def finite_operands(x: Any, packed: bool) -> Finite:
    """Of chunks with query, key, value, g and, but for `state_space_dual`, beta."""
    if not packed:
        return Finite(x, None, None)
    broken_g = jnp.isnan(x.g) | (x.g == jnp.inf)  # -inf forgets
    of_channels = x.g.ndim == x.value.ndim
    broken = broken_g.any(-1) if of_channels else broken_g
    new = {name: finite(y) for name, y in x._asdict().items() if name in FINITE}
    broken |= ~of_group(all_finite(x.key), broken)
    if "beta" in new:
        broken |= ~jnp.isfinite(x.beta)
    value, g = told(broken, x.value), jnp.where(broken_g, 0, x.g)
    chunks = x._replace(**new, value=value, g=g)
    return Finite(chunks, ~of_group(all_finite(x.query), broken), broken)


def of_group(x, like):
    """Of key heads `[b c k i]` as `[b c k 1 i]`, if it is not so already."""
    return x if x.ndim == like.ndim else x[:, :, :, None]


def product_of_seen(weights, x, seen):
    """The sums over j of weights_ij x_jv where i sees j, `[i v]`; None: no matter what.

    NaN where a number that i sees is not finite: in all columns in which any of the
    chunk is not, that is exactly there unless two sequences of a chunk are broken.
    """
    if seen is None:
        return jnp.matmul(weights, x)
    broken = ~jnp.isfinite(x)
    y = jnp.matmul(weights, jnp.where(broken, 0, x))
    rows = jnp.any(seen & broken.any(-1)[..., None, :], -1)
    return jnp.where(rows[..., None] & broken.any(-2, keepdims=True), jnp.nan, y)
