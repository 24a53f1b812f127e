"""Multi-axis rotary tables: each pair turns by one of several positions of its token.

angle_i = positions[axis(i)] * f_i   (https://arxiv.org/abs/2409.12191, section 2.1)
"""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Real

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.rope.rope_frequencies import RopeScaling, rope_frequencies

Layout = Literal["contiguous", "interleaved"]


@check_arguments
def mrope_cos_sin(
    positions: Real[Array, "axes ... t"],
    rotary_dim: int,
    *,
    sections: Sequence[int],
    layout: Layout = "contiguous",
    theta: float = 10000.0,
    freq_dim: int | None = None,
    scaling: RopeScaling | None = None,
    frequency_factors: Float[Array, " r"] | None = None,
    length: int | Int[Array, "..."] | None = None,
) -> tuple[Float[Array, "... t r"], Float[Array, "... t r"]]:
    """The tables of apply_rope for tokens that have a time, a height and a width.

        cos_i = m cos(positions[axis(i)] f_i),   m and f_i as in rope_cos_sin

    `sections` = (s0, s1, ...) shares the r = rotary_dim / 2 pairs out to the axes:

    | layout        | axis of pair i, with j = i mod sum(sections)      | models    |
    |---------------|---------------------------------------------------|-----------|
    | "contiguous"  | s0 pairs for axis 0, then s1 for axis 1, ...      | Qwen2-VL  |
    | "interleaved" | j mod 3 while j < 3 s[j mod 3], else the last of  | Qwen3-VL, |
    |               | four axes, or axis 0 of three                     | Qwen3.5   |

    ggml calls them MROPE and IMROPE; its VISION is `axial_rope_cos_sin`. Where all axes
    of a token are equal (text) both are `rope_cos_sin`. "interleaved" with three axes
    is Hugging Face's rule, with four ggml's. For (24, 20, 20) of 64 pairs they differ:
    pairs 61 and 62 turn by the time in the one and by the fourth axis in the other.

    Source: https://arxiv.org/abs/2409.12191.

    Args:
      positions: `[axes, ..., t]` int or float: time, height, width and perhaps a
        fourth.
      rotary_dim: how many of the head's dims rotate; even.
      sections: how many pairs each axis has, one number per axis.
      layout: see the table.
      theta, freq_dim, scaling, frequency_factors: see rope_frequencies.
      length: see rope_cos_sin; default the highest position on any axis + 1.

    Returns:
      cos, sin: `[..., t, r]` float32.

    Raises:
      TypeError: positions without an axis and a token dim.
      ValueError: an unknown layout, or sections that do not match the axes.

    Example:
      >>> positions = jnp.array([[0, 0], [0, 1], [0, 2]])  # time, height, width
      >>> cos, sin = jaxkern.mrope_cos_sin(positions, 8, sections=(2, 1, 1), theta=1e2)
      >>> sin  # two pairs of the time, one of the height, one of the width
      Array([[0.   , 0.   , 0.   , 0.   ],
             [0.   , 0.   , 0.1  , 0.063]], dtype=float32)
    """
    positions = jnp.asarray(positions)
    if positions.ndim < 2:
        raise TypeError(
            "mrope_cos_sin: `positions` must have dims [axes ... t], got shape "
            f"{positions.shape}."
        )
    axis = axis_of_pairs(rotary_dim // 2, tuple(sections), layout, positions.shape[0])
    if length is None:
        length = jnp.max(positions, axis=(0, -1), initial=-1).astype(jnp.int32) + 1
    freqs = rope_frequencies(
        rotary_dim,
        theta=theta,
        freq_dim=freq_dim,
        scaling=scaling,
        frequency_factors=frequency_factors,
        length=length,
    )
    first, *others = (p[..., None] for p in positions.astype(jnp.float32))
    turning = first  # [..., t, r]: the position that each pair reads
    for k, other in enumerate(others, 1):
        turning = jnp.where(axis == k, other, turning)
    angle = turning * freqs[..., None, :]
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def axis_of_pairs(
    pairs: int, sections: tuple[int, ...], layout: str, axes: int
) -> np.ndarray:
    """Which axis each pair reads: int `[r]`."""
    if len(sections) != axes or min(sections) < 0 or sum(sections) < 1:
        raise ValueError(
            f"mrope_cos_sin: sections {sections} for {axes} axes of `positions`. Give "
            "one number of pairs per axis."
        )
    sector = np.arange(pairs) % sum(sections)
    if layout == "contiguous":
        return np.searchsorted(np.cumsum(sections), sector, side="right")
    if layout != "interleaved":
        raise ValueError(
            f'mrope_cos_sin: layout {layout!r} is not "contiguous" or "interleaved".'
        )
    if axes not in (3, 4):
        raise ValueError(
            f"mrope_cos_sin: layout 'interleaved' is for 3 or 4 axes, got {axes}."
        )
    own = sector < 3 * np.asarray(sections)[sector % 3]
    return np.where(own, sector % 3, 3 if axes == 4 else 0)
