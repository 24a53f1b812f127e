"""head_norm_rope of the queries and of the keys in one op  (https://arxiv.org/abs/2505.09388)."""

from typing import NamedTuple, Unpack

from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.rope.head_norm_rope import (
    head_norm_rope_bwd_reference,
    head_norm_rope_fwd_reference,
)
from jaxkern.primitives.rope.rope import (
    NormedRotation,
    Pairing,
    check_pairs,
    rotary_tables,
)


@check_arguments
def qk_norm_rope(
    query: Float[Array, "... t k*g h"],
    key: Float[Array, "... t k h"],
    query_weight: Float[Array, " h"] | None,
    key_weight: Float[Array, " h"] | None,
    cos: Float[Array, "... t r"],
    sin: Float[Array, "... t r"],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    pairing: Pairing = "neox",
    pair_offset: int | None = None,
    at_end: bool = False,
) -> tuple[Float[Array, "... t k*g h"], Float[Array, "... t k h"]]:
    """Normalises and rotates the queries and keys of an attention layer.

        head_norm_rope(query, query_weight, cos, sin)
        head_norm_rope(key, key_weight, cos, sin)

    One op, so that a kernel reads the tables once and starts once. On a mesh that cuts
    the key heads, the g query heads of each stay with it, as in `attention`; where only
    query heads are cut (k = 1), call head_norm_rope for each.

    Source: https://arxiv.org/abs/2505.09388.

    Args:
      query: `[..., t, n, h]`, any float dtype; n = k*g heads, a multiple of key's.
      key: `[..., t, k, h]`, any float dtype.
      query_weight, key_weight: `[h]`, or None for no scale.
      cos, sin: `[..., t, r]`, leading dims as the query's or none of them.
      eps, offset, pairing, pair_offset, at_end: see head_norm_rope.

    Returns:
      query: `[..., t, n, h]`, dtype of query.
      key: `[..., t, k, h]`, dtype of key.

    Raises:
      TypeError: shapes or dtypes that do not fit.
      ValueError: an unknown pairing, or pairs that overlap or leave the head, or
        an eps that is negative or not finite.

    Example:
      >>> query, key = jnp.full((2, 4, 4), 5.0), jnp.ones((2, 1, 4))  # 4 heads and 1
      >>> cos, sin = jaxkern.rope_cos_sin(jnp.array([0, 1]), 4)
      >>> query, key = jaxkern.qk_norm_rope(query, key, None, None, cos, sin)
      >>> query.shape
      (2, 4, 4)
      >>> key[:, 0]
      Array([[ 1.   ,  1.   ,  1.   ,  1.   ],
             [-0.301,  0.99 ,  1.382,  1.01 ]], dtype=float32)
    """
    cos, sin, pair_offset = rotary_tables(
        "qk_norm_rope", query, cos, sin, pairing, pair_offset
    )
    options = dict(pairing=pairing, pair_offset=pair_offset, at_end=at_end)
    operands = query, key, query_weight, key_weight, cos, sin
    return qk_norm_rope_p(*operands, eps=eps, offset=offset, **options)


class HeadsAndTables(NamedTuple):
    """The operands, and a gradient for each."""

    query: Float[Array, "... t k*g h"]
    key: Float[Array, "... t k h"]
    query_weight: Float[Array, " h"] | None
    key_weight: Float[Array, " h"] | None
    cos: Float[Array, "... t r"]
    sin: Float[Array, "... t r"]


def qk_norm_rope_fwd_reference(
    o: HeadsAndTables,
    *,
    eps: float,
    **rotation: Unpack[NormedRotation],
) -> tuple[
    Float[Array, "... t k*g h"],
    Float[Array, "... t k h"],
    Float[Array, "... t k*g 1"],
    Float[Array, "... t k 1"],
]:
    check_pairs(
        "qk_norm_rope", o.query.shape[-1], o.cos.shape[-1], rotation["pair_offset"]
    )
    (y_query, query_rstd), (y_key, key_rstd) = (
        head_norm_rope_fwd_reference(x, weight, o.cos, o.sin, eps=eps, **rotation)
        for x, weight in ((o.query, o.query_weight), (o.key, o.key_weight))
    )
    return y_query, y_key, query_rstd, key_rstd


qk_norm_rope_reference = without_residuals(qk_norm_rope_fwd_reference, 2)


def qk_norm_rope_bwd_reference(
    o: HeadsAndTables,
    query_rstd: Float[Array, "... t k*g 1"],
    key_rstd: Float[Array, "... t k 1"],
    dy_query: Float[Array, "... t k*g h"],
    dy_key: Float[Array, "... t k h"],
    *,
    eps: float,
    **rotation: Unpack[NormedRotation],
) -> HeadsAndTables:
    (dquery, dquery_weight, *dtables), (dkey, dkey_weight, *dtables_of_key) = (
        head_norm_rope_bwd_reference(
            x, weight, o.cos, o.sin, rstd, dy, eps=eps, **rotation
        )
        for x, weight, rstd, dy in (
            (o.query, o.query_weight, query_rstd, dy_query),
            (o.key, o.key_weight, key_rstd, dy_key),
        )
    )
    dcos, dsin = (a + b for a, b in zip(dtables, dtables_of_key, strict=True))
    return HeadsAndTables(dquery, dkey, dquery_weight, dkey_weight, dcos, dsin)


qk_norm_rope_p = kernel_primitive(
    qk_norm_rope_reference,
    fwd=qk_norm_rope_fwd_reference,
    bwd=qk_norm_rope_bwd_reference,
    # The mean runs over h, and a pair's dims may be far apart. The keys have no g: were
    # it cut, each device would add the same keys' part to dcos.
    replicated=("g", "h", "r"),
)
