"""Rotary position embedding: pairs of dims turn by an angle that grows with position.

(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)  (https://arxiv.org/abs/2104.09864)
"""

from typing import Literal, TypedDict

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.rope.rope_frequencies import RopeScaling, rope_cos_sin

Pairing = Literal["neox", "interleaved"]


class NormedRotation(TypedDict):
    """Options of what norms heads and rotates them, as `rotary_tables` leaves them."""

    offset: float
    pairing: str
    pair_offset: int
    at_end: bool


@check_arguments
def rope(
    x: Float[Array, "... t n h"],
    positions: Int[Array, "... t"],
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    pairing: Pairing = "neox",
    freq_dim: int | None = None,
    pair_offset: int | None = None,
    at_end: bool = False,
    scaling: RopeScaling | None = None,
    frequency_factors: Float[Array, " r"] | None = None,
    length: int | Int[Array, "..."] | None = None,
) -> Float[Array, "... t n h"]:
    """Rotates queries or keys by their positions.

        apply_rope(x, *rope_cos_sin(positions, rotary_dim, ...))

    The four partial rotaries in use, for a head of h dims of which r2 = rotary_dim
    rotate:

    | model                        | pairing       | pair_offset | freq_dim |
    |------------------------------|---------------|-------------|----------|
    | Llama, GPT-NeoX, Qwen3-Next  | "neox"        | r2/2        | r2       |
    | Gemma 4 ("proportional")     | "neox"        | h/2         | h        |
    | GPT-J, Llama as GGUF "NORM"  | "interleaved" | -           | r2       |
    | DeepSeek, with `at_end=True` | "interleaved" | -           | r2       |

    The first row is the default, as in Hugging Face and ggml. For tokens with several
    positions see `mrope_cos_sin` (time, height, width) and `axial_rope` (grids).

    Source: https://arxiv.org/abs/2104.09864.

    Args:
      x: `[..., t, n, h]`, any float dtype; n heads of h dims.
      positions: `[..., t]` int, leading dims as x's or none of them; may be traced.
      theta, freq_dim, scaling, frequency_factors, length: see rope_cos_sin.
      rotary_dim: how many dims of the head rotate; all h unless given. The rest passes.
      pairing, pair_offset, at_end: see apply_rope.

    Returns:
      `[..., t, n, h]`, dtype of x.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an unknown pairing, or a number of dims, theta or scaling that is not
        possible.

    Example:
      >>> x = jnp.ones((2, 1, 4))  # [t, heads, h]
      >>> jaxkern.rope(x, jnp.array([0, 1]))[:, 0]
      Array([[ 1.   ,  1.   ,  1.   ,  1.   ],
             [-0.301,  0.99 ,  1.382,  1.01 ]], dtype=float32)
    """
    cos, sin = rope_cos_sin(
        positions,
        x.shape[-1] if rotary_dim is None else rotary_dim,
        theta=theta,
        freq_dim=freq_dim,
        scaling=scaling,
        frequency_factors=frequency_factors,
        length=length,
    )
    return apply_rope(
        x, cos, sin, pairing=pairing, pair_offset=pair_offset, at_end=at_end
    )


@check_arguments
def apply_rope(
    x: Float[Array, "... t n h"],
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    *,
    pairing: Pairing = "neox",
    pair_offset: int | None = None,
    at_end: bool = False,
) -> Float[Array, "... t n h"]:
    """Rotates r pairs of dims of each head; the other h - 2r dims pass unchanged.

        y[a_i] = x[a_i] cos_i - x[b_i] sin_i
        y[b_i] = x[b_i] cos_i + x[a_i] sin_i                        i = 0 ... r-1

    with (a_i, b_i) = (i, i + pair_offset) for "neox", (2i, 2i + 1) for "interleaved".
    With `at_end` these are counted so that the last pair ends with the head, behind
    the dims without a position: DeepSeek's heads.
    Computed in float32 and rounded once. Linear in x: its transpose is apply_rope by
    -sin.

    Source: https://arxiv.org/abs/2104.09864.

    Args:
      x: `[..., t, n, h]`, any float dtype.
      cos, sin: `[..., t, r]`, leading dims as x's or none of them; 2r <= h.
      pairing: "neox" (halves) or "interleaved" (neighbours). ggml calls them NEOX and
        NORM.
      pair_offset: distance of the two dims of a "neox" pair; r unless given. Gemma 4's
        "proportional" partial rotary has h/2.
      at_end: rotate the last dims of the head instead of the first.

    Returns:
      `[..., t, n, h]`, dtype of x.

    Raises:
      TypeError: shapes that do not fit.
      ValueError: an unknown pairing, or pairs that overlap or leave the head.

    Example:
      >>> x = jnp.ones((2, 1, 4))  # [t, heads, h]
      >>> cos, sin = jaxkern.rope_cos_sin(jnp.array([0, 1]), 4)
      >>> jaxkern.apply_rope(x, cos, sin)[:, 0]
      Array([[ 1.   ,  1.   ,  1.   ,  1.   ],
             [-0.301,  0.99 ,  1.382,  1.01 ]], dtype=float32)
      >>> jaxkern.apply_rope(x, cos[:, :1], sin[:, :1], at_end=True)[1, 0]
      Array([ 1.   ,  1.   , -0.301,  1.382], dtype=float32)
    """
    cos, sin, pair_offset = rotary_tables(
        "apply_rope", x, cos, sin, pairing, pair_offset
    )
    options = dict(pairing=pairing, pair_offset=pair_offset, at_end=bool(at_end))
    return apply_rope_p(x, cos, sin, **options)


def rotary_tables(op, x, cos, sin, pairing, pair_offset):
    """The tables with x's leading dims and the distance of a pair, checked."""
    if x.ndim < 3 or cos.ndim < 2 or cos.shape != sin.shape:
        raise TypeError(
            f"{op}: `x` must have dims [... t n h], `cos` and `sin` both "
            f"[... t r], got {x.shape}, {cos.shape} and {sin.shape}."
        )
    if pairing not in ("neox", "interleaved"):
        raise ValueError(f'{op}: pairing {pairing!r} is not "neox" or "interleaved".')
    if pairing == "interleaved" and pair_offset is not None:
        raise ValueError(f"{op}: pair_offset belongs to pairing='neox'. Leave it out.")
    pair_offset = cos.shape[-1] if pair_offset is None else pair_offset
    if cos.ndim == 2:
        table = (*x.shape[:-3], *cos.shape)
        cos, sin = jnp.broadcast_to(cos, table), jnp.broadcast_to(sin, table)
    return cos, sin, pair_offset


def check_pairs(op, h, pairs, pair_offset):
    if not pairs <= pair_offset <= h - pairs:
        raise ValueError(
            f"{op}: {pairs} pairs at distance {pair_offset} do not fit a head of "
            f"{h} dims. Keep r <= pair_offset <= h - r."
        )


def split_pairs(x, pairs, pairing, pair_offset):
    """x `[..., h]` as the two sides of its pairs, `[..., r]`, and what passes."""
    if pairing == "interleaved":
        pair = x[..., : 2 * pairs].reshape(*x.shape[:-1], pairs, 2)
        return pair[..., 0], pair[..., 1], (x[..., 2 * pairs :],)
    end = pair_offset + pairs
    passed = x[..., pairs:pair_offset], x[..., end:]
    return x[..., :pairs], x[..., pair_offset:end], passed


def join_pairs(a, b, passed, pairing):
    """The inverse of split_pairs."""
    if pairing == "interleaved":
        *lead, pairs = a.shape
        ab = jnp.stack([a, b], axis=-1).reshape(*lead, 2 * pairs)
        return jnp.concatenate([ab, *passed], axis=-1)
    return jnp.concatenate([a, passed[0], b, passed[1]], axis=-1)


def apply_rope_reference(
    x: Float[Array, "... t n h"],
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    *,
    pairing: str,
    pair_offset: int,
    at_end: bool,
) -> Float[Array, "... t n h"]:
    check_pairs("apply_rope", x.shape[-1], cos.shape[-1], pair_offset)
    return rotate(x, cos, sin, pairing, pair_offset, at_end)


def first_rotated(h, pairs, pair_offset, at_end):
    """The dim of a head at which its first pair begins."""
    return h - pairs - pair_offset if at_end else 0


def rotate(x, cos, sin, pairing, pair_offset, at_end=False):
    if start := first_rotated(x.shape[-1], cos.shape[-1], pair_offset, at_end):
        rotated = rotate(x[..., start:], cos, sin, pairing, pair_offset)
        return jnp.concatenate([x[..., :start], rotated], axis=-1)
    cos, sin = (at_least_f32(c)[..., None, :] for c in (cos, sin))  # [..., t, 1, r]
    a, b, passed = split_pairs(x, cos.shape[-1], pairing, pair_offset)
    a, b = at_least_f32(a), at_least_f32(b)
    y = (a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)
    return join_pairs(*y, passed, pairing)


def apply_rope_bwd_reference(
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    dy: Float[Array, "... t n h"],
    *,
    pairing: str,
    pair_offset: int,
    at_end: bool,
) -> Float[Array, "... t n h"]:
    # the transpose of a rotation is the rotation back
    return rotate(dy, cos, -sin, pairing, pair_offset, at_end)


apply_rope_p = kernel_primitive(
    apply_rope_reference,
    bwd=apply_rope_bwd_reference,
    linear=("x",),
    replicated=("h", "r"),  # a pair's two dims may be far apart
)
