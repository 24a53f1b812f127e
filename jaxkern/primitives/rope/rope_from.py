"""Rotary position embedding of rows that follow each other: row i at offset + i."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.rope.rope import Pairing, rotate
from jaxkern.primitives.rope.rope_frequencies import rope_cos_sin


@check_arguments
def rope_from(
    x: Float[Array, "... t n h"],
    offset: int | Int[Array, ""] = 0,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    pairing: Pairing = "neox",
    at_end: bool = False,
) -> Float[Array, "... t n h"]:
    """Rotates queries or keys whose rows follow each other.

        rope(x, offset + arange(t), theta=theta, rotary_dim=rotary_dim, ...)

    The case of one sequence, or of a batch that is at one position, in which no table
    of angles is needed: a kernel can compute them on the way. Where a model rotates
    many layers at the same positions, `rope_cos_sin` and `apply_rope` share the table.
    Computed in float32 and rounded once; linear in x.

    Source: https://arxiv.org/abs/2104.09864.

    Args:
      x: `[..., t, n, h]`, any float dtype; n heads of h dims.
      offset: position of the first row, may be traced.
      theta: base of the frequencies.
      rotary_dim: how many dims of the head rotate; all h unless given. The rest passes.
      pairing: "neox" (halves) or "interleaved" (neighbours).
      at_end: rotate the last dims of the head, as DeepSeek does, instead of the first.

    Returns:
      `[..., t, n, h]`, dtype of x.

    Raises:
      TypeError: shapes that do not fit.
      ValueError: an unknown pairing, or a `rotary_dim` that is odd or exceeds h.

    Example:
      >>> x = jnp.ones((2, 1, 4))  # [t, heads, h]
      >>> jaxkern.rope_from(x)[:, 0]
      Array([[ 1.   ,  1.   ,  1.   ,  1.   ],
             [-0.301,  0.99 ,  1.382,  1.01 ]], dtype=float32)
      >>> jaxkern.rope_from(x[1:], 1)[:, 0]  # the second token alone
      Array([[-0.301,  0.99 ,  1.382,  1.01 ]], dtype=float32)
    """
    if x.ndim < 3:
        raise TypeError(f"rope_from: `x` must have dims [... t n h], got {x.shape}.")
    h = x.shape[-1]
    rotary_dim = h if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 <= rotary_dim <= h:
        raise ValueError(
            f"rope_from: rotary_dim is {rotary_dim}. It must be even and at most {h}."
        )
    if pairing not in ("neox", "interleaved"):
        raise ValueError(
            f'rope_from: pairing {pairing!r} is not "neox" or "interleaved".'
        )
    return rope_from_p(
        x,
        jnp.asarray(offset, jnp.int32),
        theta=float(theta),
        rotary_dim=rotary_dim,
        pairing=pairing,
        at_end=at_end,
    )


def rope_from_reference(
    x: Float[Array, "... t n h"],
    offset: Int[Array, ""],
    *,
    theta: float,
    rotary_dim: int,
    pairing: str,
    at_end: bool,
) -> Float[Array, "... t n h"]:
    if rotary_dim > x.shape[-1]:
        raise TypeError(
            f"rope_from: `x` has {x.shape[-1]} dims a head, fewer than rotary_dim "
            f"{rotary_dim}."
        )
    positions = offset + jnp.arange(x.shape[-3])
    cos, sin = rope_cos_sin(positions, rotary_dim, theta=theta)  # [t r]
    return rotate(x, cos, sin, pairing, cos.shape[-1], at_end)


def rope_from_bwd_reference(
    offset: Int[Array, ""],
    dy: Float[Array, "... t n h"],
    *,
    theta: float,
    rotary_dim: int,
    pairing: str,
    at_end: bool,
) -> Float[Array, "... t n h"]:
    # the transpose of a rotation is the rotation back
    positions = offset + jnp.arange(dy.shape[-3])
    cos, sin = rope_cos_sin(positions, rotary_dim, theta=theta)
    return rotate(dy, cos, -sin, pairing, cos.shape[-1], at_end)


rope_from_p = kernel_primitive(
    rope_from_reference,
    bwd=rope_from_bwd_reference,
    linear=("x",),
    replicated=("t", "h"),  # the position of a row counts from the first one
)
