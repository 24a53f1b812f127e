"""y = apply_rope(rms_norm(x) * weight), each head by itself  (https://arxiv.org/abs/2505.09388)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.rms_norm import (
    rms_norm_bwd_reference,
    rms_norm_fwd_reference,
)
from jaxkern.primitives.rope.rope import (
    Pairing,
    check_pairs,
    first_rotated,
    rotary_tables,
    rotate,
    split_pairs,
)


@check_arguments
def head_norm_rope(
    x: Float[Array, "... t n h"],
    weight: Float[Array, " h"] | None,
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    pairing: Pairing = "neox",
    pair_offset: int | None = None,
    at_end: bool = False,
) -> Float[Array, "... t n h"]:
    """Normalises each head of the queries or keys, then rotates it by its position.

        normed = x / sqrt(mean(x**2) + eps) * (weight + offset)     mean over h
        y      = apply_rope(normed, cos, sin)

    Dims that do not rotate are normed only. Computed in float32 (float64 for a float64
    `x`) and rounded once: `apply_rope(rms_norm(x))` in bfloat16 rounds the norm too.
    For queries and keys in one go see `qk_norm_rope`.

    Source: https://arxiv.org/abs/2505.09388.

    Args:
      x: `[..., t, n, h]`, any float dtype; n heads of h dims.
      weight: `[h]`, one for all heads, or None for no scale.
      cos, sin: `[..., t, r]`, leading dims as x's or none of them, from `rope_cos_sin`.
      eps: added to the mean square, in units of x**2.
      offset: added to `weight`; 1.0 for Gemma 3, which stores weight - 1.
      pairing, pair_offset, at_end: see apply_rope.

    Returns:
      y: `[..., t, n, h]`, dtype of x.

    Raises:
      TypeError: shapes or dtypes that do not fit.
      ValueError: an unknown pairing, or pairs that overlap or leave the head, or
        an eps that is negative or not finite.

    Example:
      >>> x = jnp.full((2, 1, 4), 5.0)  # [t, heads, h]
      >>> cos, sin = jaxkern.rope_cos_sin(jnp.array([0, 1]), 4)
      >>> jaxkern.head_norm_rope(x, None, cos, sin)[:, 0]
      Array([[ 1.   ,  1.   ,  1.   ,  1.   ],
             [-0.301,  0.99 ,  1.382,  1.01 ]], dtype=float32)
    """
    cos, sin, pair_offset = rotary_tables(
        "head_norm_rope", x, cos, sin, pairing, pair_offset
    )
    options = dict(pairing=pairing, pair_offset=pair_offset, at_end=at_end)
    return head_norm_rope_p(x, weight, cos, sin, eps=eps, offset=offset, **options)


def head_norm_rope_fwd_reference(
    x: Float[Array, "... t n h"],
    weight: Float[Array, " h"] | None,
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    *,
    eps: float,
    offset: float,
    pairing: str,
    pair_offset: int,
    at_end: bool,
) -> tuple[Float[Array, "... t n h"], Float[Array, "... t n 1"]]:
    check_pairs("head_norm_rope", x.shape[-1], cos.shape[-1], pair_offset)
    normed, rstd = rms_norm_fwd_reference(
        at_least_f32(x), weight, None, eps=eps, offset=offset
    )
    return rotate(normed, cos, sin, pairing, pair_offset, at_end).astype(x.dtype), rstd


head_norm_rope_reference = without_residuals(head_norm_rope_fwd_reference)


def head_norm_rope_bwd_reference(
    x: Float[Array, "... t n h"],
    weight: Float[Array, " h"] | None,
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    rstd: Float[Array, "... t n 1"],
    dy: Float[Array, "... t n h"],
    *,
    eps: float,
    offset: float,
    pairing: str,
    pair_offset: int,
    at_end: bool,
) -> tuple[
    Float[Array, "... t n h"],
    Float[Array, " h"] | None,
    Float[Array, "... t r"],
    Float[Array, "... t r"],
]:
    dy32 = at_least_f32(dy)
    back = rotate(dy32, cos, -sin, pairing, pair_offset, at_end)
    dx, dweight, _ = rms_norm_bwd_reference(
        x, weight, None, rstd, back, eps=eps, offset=offset
    )
    normed = at_least_f32(x) * rstd
    if weight is not None:
        normed = normed * (at_least_f32(weight) + offset)
    pairs = cos.shape[-1]
    start = first_rotated(x.shape[-1], pairs, pair_offset, at_end)
    a, b, _ = split_pairs(normed[..., start:], pairs, pairing, pair_offset)
    da, db, _ = split_pairs(dy32[..., start:], pairs, pairing, pair_offset)
    dcos = jnp.sum(da * a + db * b, axis=-2)  # all heads share one table
    dsin = jnp.sum(db * a - da * b, axis=-2)
    return dx, dweight, dcos.astype(cos.dtype), dsin.astype(sin.dtype)


head_norm_rope_p = kernel_primitive(
    head_norm_rope_reference,
    fwd=head_norm_rope_fwd_reference,
    bwd=head_norm_rope_bwd_reference,
    replicated=("h", "r"),  # the mean runs over h, and a pair's dims may be far apart
)
