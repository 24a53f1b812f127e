"""q, k, v = split(silu(conv1d(x))), q and k normed  (https://arxiv.org/abs/2412.06464).

From the product of a gated delta net, as in Qwen3-Next and Qwen3.5, to what its rule
reads, in one pass each way.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.causal_conv1d import (
    causal_conv1d_bwd_reference,
    causal_conv1d_reference,
)
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.l2_norm import (
    l2_norm_bwd_reference,
    l2_norm_fwd_reference,
    l2_norm_reference,
)


@check_arguments
def gated_delta_net_inputs(
    x: Float[Array, "b t f"],
    weight: Float[Array, "c w"],
    *,
    key_heads: int,
    key_dim: int,
    gate_columns: int,
    segment_ids: Int[Array, "b t"] | None = None,
    eps: float = 1e-6,
) -> tuple[
    Float[Array, "b t k h"],
    Float[Array, "b t k h"],
    Float[Array, "b t v"],
    Float[Array, "b t m"],
    Float[Array, "b t r"],
]:
    """Queries, keys and values of `gated_delta_rule` out of the layer's one product.

        convolved, gate, rest = split(x, (c, c + gate_columns), axis=-1)
        query, key, value = split(causal_conv1d(convolved, weight, activation="silu"))
        query, key = l2_norm of each head of key_dim columns

    The gradient of the product is made as one array. Computed in float32 (float64 for
    float64 operands) and rounded once: nothing is rounded between the convolution and
    the norm.

    Source: https://arxiv.org/abs/2412.06464.

    Args:
      x: `[b, t, f]`, any float dtype: columns of queries, keys, values and gate, and
        others behind them.
      weight: `[c, w]`, the taps of queries, keys and values: see `causal_conv1d`.
      key_heads: heads of the queries, and of the keys.
      key_dim: columns of each.
      gate_columns: of the gate.
      segment_ids: `[b, t]` int: see `causal_conv1d`.
      eps: see `l2_norm`.

    Returns:
      query, key: `[b, t, key_heads, key_dim]`, dtype of x.
      value: `[b, t, c - 2 * key_heads * key_dim]`.
      gate: `[b, t, gate_columns]`, as they come.
      rest: `[b, t, f - c - gate_columns]`, likewise.

    Raises:
      TypeError: a dtype is no float, or a dim differs between operands.
      ValueError: x or weight has fewer columns than are named, weight has no taps, or
        eps is negative.

    Example:
      >>> x = jnp.array([[[3.0, 4.0, 1.0, 2.0, 5.0, 6.0, 7.0]]])
      >>> query, key, value, gate, rest = jaxkern.gated_delta_net_inputs(
      ...     x, jnp.ones((5, 1)), key_heads=1, key_dim=2, gate_columns=1
      ... )
      >>> query[0, 0]
      Array([[0.588, 0.809]], dtype=float32)
      >>> gate[0, 0], rest[0, 0]
      (Array([6.], dtype=float32), Array([7.], dtype=float32))
    """
    return gated_delta_net_inputs_p(
        x,
        weight,
        segment_ids,
        key_heads=key_heads,
        key_dim=key_dim,
        gate_columns=gate_columns,
        eps=eps,
    )


def check_sizes(f: int, c: int, taps: int, keys: int, gate_columns: int) -> None:
    """Raises ValueError where the parts do not fit the product or there is no tap."""
    if not taps:
        raise ValueError(
            "gated_delta_net_inputs: `weight` has no taps, it takes one or more."
        )
    if 2 * keys > c or keys < 0 or gate_columns < 0 or c + gate_columns > f:
        raise ValueError(
            f"gated_delta_net_inputs: `x` has {f} columns and `weight` {c} rows, too "
            f"few for queries and keys of {keys} columns each, which the convolution "
            f"has, and {gate_columns} of the gate behind it."
        )


def gated_delta_net_inputs_reference(
    x: Float[Array, "b t f"],
    weight: Float[Array, "c w"],
    segment_ids: Int[Array, "b t"] | None,
    *,
    key_heads: int,
    key_dim: int,
    gate_columns: int,
    eps: float,
) -> tuple[
    Float[Array, "b t k h"],
    Float[Array, "b t k h"],
    Float[Array, "b t v"],
    Float[Array, "b t m"],
    Float[Array, "b t r"],
]:
    (b, t, f), c, keys = x.shape, weight.shape[0], key_heads * key_dim
    check_sizes(f, c, weight.shape[1], keys, gate_columns)
    convolved, gate, rest = jnp.split(x, (c, c + gate_columns), axis=-1)
    y = causal_conv1d_reference(
        at_least_f32(convolved), weight, None, None, segment_ids, activation="silu"
    )
    query, key, value = jnp.split(y, (keys, 2 * keys), axis=-1)
    query, key = (
        l2_norm_reference(a.reshape(b, t, key_heads, key_dim), eps=eps).astype(x.dtype)
        for a in (query, key)
    )
    return query, key, value.astype(x.dtype), gate, rest


def gated_delta_net_inputs_bwd_reference(
    x: Float[Array, "b t f"],
    weight: Float[Array, "c w"],
    segment_ids: Int[Array, "b t"] | None,
    dquery: Float[Array, "b t k h"],
    dkey: Float[Array, "b t k h"],
    dvalue: Float[Array, "b t v"],
    dgate: Float[Array, "b t m"],
    drest: Float[Array, "b t r"],
    *,
    key_heads: int,
    key_dim: int,
    gate_columns: int,
    eps: float,
) -> tuple[Float[Array, "b t f"], Float[Array, "c w"]]:
    del gate_columns  # the cotangents have them
    (b, t, _), c = x.shape, weight.shape[0]
    convolved = at_least_f32(x[..., :c])
    y = causal_conv1d_reference(
        convolved, weight, None, None, segment_ids, activation="silu"
    )
    keys = key_heads * key_dim
    parts = []
    for at, dy in ((0, dquery), (keys, dkey)):
        a = y[..., at : at + keys].reshape(b, t, key_heads, key_dim)
        _, rnorm = l2_norm_fwd_reference(a, eps=eps)
        part = l2_norm_bwd_reference(a, rnorm, dy, eps=eps)
        parts.append(part.reshape(b, t, keys))
    dy = jnp.concatenate([*parts, at_least_f32(dvalue)], axis=-1)
    dx, dweight, _, _ = causal_conv1d_bwd_reference(
        convolved, weight, None, None, segment_ids, dy, activation="silu"
    )
    dx = dx.astype(x.dtype)
    return jnp.concatenate([dx, dgate, drest], axis=-1), dweight


gated_delta_net_inputs_p = kernel_primitive(
    gated_delta_net_inputs_reference,
    bwd=gated_delta_net_inputs_bwd_reference,
    # each token needs those before it; a part of the columns is not those of one part
    replicated=("t", "w", "f", "c", "k", "h", "v", "m", "r"),
)
