"""Heads of one product of queries, keys and values, rotated  (https://arxiv.org/abs/2104.09864)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.rope.rope import (
    Pairing,
    check_pairs,
    rotary_tables,
    rotate,
)


@check_arguments
def qkv_rope(
    qkv: Float[Array, "... t n h"],
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    *,
    kv_heads: int,
    pairing: Pairing = "neox",
    pair_offset: int | None = None,
) -> tuple[
    Float[Array, "... t q h"], Float[Array, "... t k h"], Float[Array, "... t k h"]
]:
    """Queries, keys and values out of their one product, the first two rotated.

        query, key, value = split(qkv, (q, q + k), axis=-2)
        apply_rope(query, cos, sin), apply_rope(key, cos, sin), value

    with k = kv_heads and q = n - 2 k. The gradient of the product is made as one array,
    which three slices of it would have added up or put side by side. Linear in qkv.

    Source: https://arxiv.org/abs/2104.09864.

    Args:
      qkv: `[..., t, n, h]`, any float dtype: heads of the queries, of the keys, of the
        values.
      cos, sin: `[..., t, r]`, leading dims as qkv's or none of them; 2r <= h.
      kv_heads: heads of the keys, and of the values.
      pairing, pair_offset: see `apply_rope`.

    Returns:
      query: `[..., t, q, h]`, dtype of qkv.
      key, value: `[..., t, k, h]`, likewise.

    Raises:
      TypeError: shapes that do not fit.
      ValueError: an unknown pairing, pairs that overlap or leave the head, or fewer
        heads than those of keys and values.

    Example:
      >>> qkv = jnp.ones((2, 3, 4))  # [t, heads, h]: a query, a key and a value
      >>> cos, sin = jaxkern.rope_cos_sin(jnp.array([0, 1]), 4)
      >>> query, key, value = jaxkern.qkv_rope(qkv, cos, sin, kv_heads=1)
      >>> key[1, 0]
      Array([-0.301,  0.99 ,  1.382,  1.01 ], dtype=float32)
      >>> value[1, 0]
      Array([1., 1., 1., 1.], dtype=float32)
    """
    cos, sin, pair_offset = rotary_tables(
        "qkv_rope", qkv, cos, sin, pairing, pair_offset
    )
    options = dict(kv_heads=kv_heads, pairing=pairing, pair_offset=pair_offset)
    return qkv_rope_p(qkv, cos, sin, **options)


def qkv_rope_reference(
    qkv: Float[Array, "... t n h"],
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    *,
    kv_heads: int,
    pairing: str,
    pair_offset: int,
) -> tuple[
    Float[Array, "... t q h"], Float[Array, "... t k h"], Float[Array, "... t k h"]
]:
    *_, n, h = qkv.shape
    check_pairs("qkv_rope", h, cos.shape[-1], pair_offset)
    if not 0 <= 2 * kv_heads <= n:
        raise ValueError(
            f"qkv_rope: `kv_heads` must be at most half of the {n} heads of `qkv`, got "
            f"{kv_heads}."
        )
    q, k, v = jnp.split(qkv, (n - 2 * kv_heads, n - kv_heads), axis=-2)
    q, k = (rotate(x, cos, sin, pairing, pair_offset) for x in (q, k))
    return q, k, v


def qkv_rope_bwd_reference(
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    dquery: Float[Array, "... t q h"],
    dkey: Float[Array, "... t k h"],
    dvalue: Float[Array, "... t k h"],
    *,
    kv_heads: int,
    pairing: str,
    pair_offset: int,
) -> Float[Array, "... t n h"]:
    del kv_heads  # the cotangents have them
    dq, dk = (rotate(x, cos, -sin, pairing, pair_offset) for x in (dquery, dkey))
    return jnp.concatenate([dq, dk, dvalue], axis=-2)


qkv_rope_p = kernel_primitive(
    qkv_rope_reference,
    bwd=qkv_rope_bwd_reference,
    linear=("qkv",),
    # a part of the heads has not those of queries, keys and values
    replicated=("n", "q", "k", "h", "r"),
)
