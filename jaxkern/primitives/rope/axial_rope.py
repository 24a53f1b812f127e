"""Axial rotary embedding: an equal part of each head's pairs for each axis of a grid.

angle = positions[axis] * theta**(-2 i / (h / axes))   (https://arxiv.org/abs/2403.13298)
"""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.rope.rope import apply_rope
from jaxkern.primitives.rope.rope_frequencies import rope_cos_sin

AxialPairing = Literal["interleaved", "neox", "neox_parts"]


@check_arguments
def axial_rope(
    x: Float[Array, "... t n h"],
    positions: Int[Array, "axes ... t"],
    *,
    pairing: AxialPairing = "interleaved",
    theta: float = 10000.0,
) -> Float[Array, "... t n h"]:
    """Rotates queries or keys by positions on a grid.

    Each axis turns h / (2 axes) pairs by `axial_rope_cos_sin`. Models differ in which
    dims make a pair; here for two axes, with i < h/4 for each of them:

    | pairing       | pairs of axis 0 | pairs of axis 1         | models          |
    |---------------|-----------------|-------------------------|-----------------|
    | "interleaved" | 2i, 2i + 1      | h/2 + 2i, h/2 + 2i + 1  | SAM 2           |
    | "neox"        | i, i + h/2      | h/4 + i, h/4 + i + h/2  | ViT of Qwen2-VL |
    | "neox_parts"  | i, i + h/4      | h/2 + i, h/2 + i + h/4  | ViT of Gemma 4  |

    Axis 0 is the column x for SAM 2 and Gemma 4, the row y for Qwen2-VL (ggml VISION).

    Source: https://arxiv.org/abs/2403.13298.

    Args:
      x: `[..., t, n, h]`, any float dtype; h a multiple of 2 axes.
      positions: `[axes, ..., t]` int, `...` as x's or nothing; may be traced.
      pairing: see the table.
      theta: the base (Gemma 4: 100).

    Returns:
      `[..., t, n, h]`, dtype of x.

    Raises:
      TypeError: shapes that do not fit.
      ValueError: an unknown pairing, or a head that cannot be shared out.

    Example:
      >>> x = jnp.ones((3, 1, 4))  # three tokens of one head
      >>> positions = jnp.array([[0, 1, 0], [0, 0, 1]])  # their columns, their rows
      >>> jaxkern.axial_rope(x, positions)[:, 0]
      Array([[ 1.   ,  1.   ,  1.   ,  1.   ],
             [-0.301,  1.382,  1.   ,  1.   ],
             [ 1.   ,  1.   , -0.301,  1.382]], dtype=float32)
    """
    if pairing not in ("interleaved", "neox", "neox_parts"):
        raise ValueError(
            f"axial_rope: pairing {pairing!r} is not 'interleaved', 'neox' or "
            "'neox_parts'."
        )
    if x.ndim < 3 or jnp.ndim(positions) not in (2, x.ndim - 1):
        raise TypeError(
            "axial_rope: `x` must have dims [... t n h] and `positions` [axes ... t] "
            f"or [axes t], got {x.shape} and {jnp.shape(positions)}."
        )
    cos, sin = axial_rope_cos_sin(positions, x.shape[-1], theta=theta)
    if pairing != "neox_parts":
        return apply_rope(x, cos, sin, pairing=pairing)
    axes = len(positions)
    table = (*x.shape[:-2], cos.shape[-1])
    x, cos, sin = (
        jnp.stack(jnp.split(a, axes, axis=-1))  # [axes, ..., own share]
        for a in (x, jnp.broadcast_to(cos, table), jnp.broadcast_to(sin, table))
    )
    return jnp.concatenate(list(apply_rope(x, cos, sin)), axis=-1)


@check_arguments
def axial_rope_2d(
    x: Float[Array, "... t n h"],
    grid: tuple[int, int],
    *,
    theta: float = 10000.0,
    repeat: Literal["tile", "block"] = "tile",
    num_exclude_rope: int = 0,
) -> Float[Array, "... t n h"]:
    """SAM 2's rotary embedding of image tokens in row-major order.

        axial_rope(x, (column, row) of each token, pairing="interleaved")

    The memory attention has several images of keys, one after the other, and then
    tokens without a place in an image (object pointers), which stay as they are:

    | repeat  | grid place of token i, of m = t - num_exclude_rope   |
    |---------|------------------------------------------------------|
    | "tile"  | i mod (height width): image after image, as in SAM 2 |
    | "block" | i // (m / (height width)): each place m / .. times   |

    Source: https://arxiv.org/abs/2403.13298.

    Args:
      x: `[..., t, n, h]`, any float dtype; h a multiple of 4.
      grid: (height, width) in tokens; m must be a multiple of height * width.
      theta: the base.
      repeat: see the table.
      num_exclude_rope: how many of the last tokens are not rotated.

    Returns:
      `[..., t, n, h]`, dtype of x.

    Raises:
      TypeError: fewer than three dims.
      ValueError: tokens that do not fill the grid, or an unknown `repeat`.

    Example:
      >>> x = jnp.ones((4, 1, 4))  # a grid of 2 x 2 tokens
      >>> jaxkern.axial_rope_2d(x, (2, 2))[:, 0]
      Array([[ 1.   ,  1.   ,  1.   ,  1.   ],
             [-0.301,  1.382,  1.   ,  1.   ],
             [ 1.   ,  1.   , -0.301,  1.382],
             [-0.301,  1.382, -0.301,  1.382]], dtype=float32)
    """
    if x.ndim < 3:
        raise TypeError(
            f"axial_rope_2d: `x` must have dims [... t n h], got {x.shape}."
        )
    height, width = grid
    places, rotated = height * width, x.shape[-3] - num_exclude_rope
    if repeat not in ("tile", "block"):
        raise ValueError(f'axial_rope_2d: repeat {repeat!r} is not "tile" or "block".')
    if num_exclude_rope < 0 or rotated < 0 or places < 1 or rotated % places:
        raise ValueError(
            f"axial_rope_2d: {rotated} tokens are no multiple of the {places} places "
            f"of a grid of {height} by {width}. Count other tokens in num_exclude_rope."
        )
    token = np.arange(rotated)
    place = token % places if repeat == "tile" else token // max(rotated // places, 1)
    positions = jnp.asarray(np.stack([place % width, place // width]), jnp.int32)
    if not num_exclude_rope:
        return axial_rope(x, positions, theta=theta)
    image, others = x[..., :rotated, :, :], x[..., rotated:, :, :]
    return jnp.concatenate([axial_rope(image, positions, theta=theta), others], axis=-3)


@check_arguments
def axial_rope_cos_sin(
    positions: Int[Array, "axes ... t"],
    rotary_dim: int,
    *,
    sections: Sequence[int] | None = None,
    theta: float = 10000.0,
) -> tuple[Float[Array, "... t r"], Float[Array, "... t r"]]:
    """The tables of apply_rope for positions on a grid, axis 0 first.

        cos = [cos(positions[0] f_i), i < s0;  cos(positions[1] f_i), i < s1;  ...]
        f_i = theta**(-2i / (rotary_dim / axes))

    The exponent restarts for each axis, unlike that of `mrope_cos_sin`.

    Args:
      positions: `[axes, ..., t]` int, may be traced.
      rotary_dim: how many of the head's dims rotate; a multiple of 2 axes.
      sections: (s0, s1, ...), the pairs of each axis, in all r; equal unless given.
      theta: the base.

    Returns:
      cos, sin: `[..., t, r]` float32, r = rotary_dim / 2.

    Raises:
      TypeError: positions without an axis and a token dim.
      ValueError: a rotary_dim or sections that cannot be shared out.

    Example:
      >>> positions = jnp.array([[0, 1, 0], [0, 0, 1]])  # columns, rows
      >>> cos, sin = jaxkern.axial_rope_cos_sin(positions, 4)
      >>> cos
      Array([[1.  , 1.  ],
             [0.54, 1.  ],
             [1.  , 0.54]], dtype=float32)
    """
    positions = jnp.asarray(positions)
    if positions.ndim < 2:
        raise TypeError(
            "axial_rope: `positions` must have dims [axes ... t], got shape "
            f"{positions.shape}."
        )
    axes = positions.shape[0]
    if axes < 1 or rotary_dim % (2 * axes):
        raise ValueError(
            f"axial_rope: {rotary_dim} dims cannot be shared out in pairs to {axes} "
            f"axes. Give a multiple of {2 * axes}."
        )
    share = rotary_dim // axes
    sections = (share // 2,) * axes if sections is None else tuple(sections)
    if len(sections) != axes or min(sections) < 0 or 2 * sum(sections) != rotary_dim:
        raise ValueError(
            f"axial_rope: sections {sections} are not {rotary_dim // 2} pairs on "
            f"{axes} axes. Leave them out for equal parts."
        )
    tables = rope_cos_sin(positions, 2 * max(sections), theta=theta, freq_dim=share)
    cos, sin = (
        jnp.concatenate([c[..., :s] for c, s in zip(table, sections, strict=True)], -1)
        for table in tables
    )
    return cos, sin
