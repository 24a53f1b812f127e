"""The scale, or scale and offset, of a group whose rounded codes fit it best.

A grid of steps near (max - min) / n is tried. For the codes of each, the scale and
offset of least weighted squared error have a closed form:

    minimise  sum w (scale * code + offset - x)**2        w = |x| + sqrt(mean x**2)

llama.cpp's encoders search likewise, with these weights for Q4_K and Q5_K.
"""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

# steps tried, in codes more or less than the range of the format
AFFINE_STEPS = np.linspace(-1.0, 1.0, 11, dtype=np.float32)
SYMMETRIC_STEPS = np.linspace(-0.8, 0.8, 9, dtype=np.float32)
TABLE_STEPS = np.linspace(-7.0, 7.0, 15, dtype=np.float32)


def affine_fit(
    x: Float32[Array, "... n"], last: int
) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """(scale, minus offset), neither negative, for codes 0 to `last`."""
    w = weights_of(x)
    low = jnp.minimum(x.min(-1), 0)
    width = x.max(-1) - low
    step = inverse(width)[..., None] * (last + AFFINE_STEPS)  # [..., c]
    code = jnp.round(step[..., None] * (x - low[..., None])[..., None, :])
    code = jnp.clip(code, 0, last)  # [..., c, n]
    w, x = w[..., None, :], x[..., None, :]
    n, wx, xx = w.sum(-1), (w * x).sum(-1), (w * x * x).sum(-1)
    wc, cc, cx = ((w * code * f).sum(-1) for f in (1, code, x))
    spread = n * cc - wc * wc  # all codes are the same where it vanishes
    alone = jnp.where(cc == 0, wx * inverse(n), 0)
    offset = (cc * wx - wc * cx) * inverse(spread)
    offset = jnp.minimum(jnp.where(spread > 1e-5 * n * cc, offset, alone), 0)
    scale = jnp.maximum((cx - offset * wc) * inverse(cc), 0)
    error = xx + scale * scale * cc + offset * offset * n
    error += 2 * (scale * offset * wc - scale * cx - offset * wx)
    return of_least(error, scale), -of_least(error, offset)


def symmetric_fit(x: Float32[Array, "... n"], half: int) -> Float32[Array, "..."]:
    """The scale, of either sign, for codes -half to half - 1."""
    w = weights_of(x)[..., None, :]
    step = -inverse(largest(x)) * (half + SYMMETRIC_STEPS)
    code = jnp.round(step[..., None] * x[..., None, :])
    return scale_fit(w, x, jnp.clip(code, -half, half - 1))


def table_fit(
    x: Float32[Array, "... n"], table: Sequence[int]
) -> Float32[Array, "..."]:
    """The scale, of either sign, for codes that name one of some ascending numbers."""
    w = weights_of(x)[..., None, :]
    step = inverse(largest(x)) * (table[0] + TABLE_STEPS)
    _, value = nearest_in(step[..., None] * x[..., None, :], table)
    return scale_fit(w, x, value)


def scale_fit(w, x, value: Float32[Array, "... c n"]) -> Float32[Array, "..."]:
    """sum w x v / sum w v**2 of the candidate that takes most off sum w x**2."""
    vx, vv = (w * value * x[..., None, :]).sum(-1), (w * value * value).sum(-1)
    scale = vx * inverse(vv)
    return of_least(-scale * vx, scale)


def weights_of(x: Float32[Array, "... n"]) -> Float32[Array, "... n"]:
    return jnp.abs(x) + jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))


def largest(x: Float32[Array, "... n"]) -> Float32[Array, "... 1"]:
    """The value of largest magnitude; of two such the negative one."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return jnp.where(-low >= high, low, high)


def nearest_in(
    y: Float32[Array, "..."], table: Sequence[int]
) -> tuple[Int32[Array, "..."], Float32[Array, "..."]]:
    """(place, number) of the nearest of ascending numbers, as a sum of steps."""
    place, value = jnp.zeros(y.shape, jnp.int32), jnp.full(y.shape, float(table[0]))
    for a, b in itertools.pairwise(table):
        above = y > (a + b) / 2
        place = place + above.astype(jnp.int32)
        value = value + jnp.where(above, float(b - a), 0.0)
    return place, value


def of_least(
    error: Float32[Array, "... c"], value: Float32[Array, "... c"]
) -> Float32[Array, "..."]:
    """The value at the first least error: a sum, which every mesh can cut."""
    n = error.shape[-1]
    least = error == error.min(-1, keepdims=True)
    first = jnp.min(jnp.where(least, jnp.arange(n), n), -1, keepdims=True)
    return jnp.sum(jnp.where(jnp.arange(n) == first, value, 0), -1)


def inverse(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """1 / x, and 0 of 0."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))
