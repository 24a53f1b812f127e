"""`jax.nn.dot_product_attention`, `jax.lax.ragged_dot` and `ragged_dot_general`.

from jaxkern.interop.jax_nn import dot_product_attention, ragged_dot
"""

import jax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxkern.interop.attending import attend_as_jax_nn
from jaxkern.interop.calling import as_asked, takes_holders
from jaxkern.interop.ragged_product import ROWS_IN_GROUPS, ragged_product

__all__ = ["dot_product_attention", "ragged_dot", "ragged_dot_general"]


@takes_holders
def dot_product_attention(
    query: Float[ArrayLike, "b t n h"] | Float[ArrayLike, "t n h"],
    key: Float[ArrayLike, "b s k h"] | Float[ArrayLike, "s k h"],
    value: Float[ArrayLike, "b s k h"] | Float[ArrayLike, "s k h"],
    bias: Float[ArrayLike, "#b #n #t #s"] | None = None,
    mask: Bool[ArrayLike, "#b #n #t #s"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, " b"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, " b"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """`jax.nn.dot_product_attention`, by `jaxkern.attention`.

    The formula, the masks and the shapes are those of jax.nn: query i sees keys up to i
    where `is_causal`, also if there are more keys than queries. What differs:

    - a query that sees no key gives zeros, where jax.nn gives the mean of all values;
    - the residual (log-sum-exp, `[b, t, n]`) is float32 and differentiable;
    - `implementation` is None, "xla", "triton" or "mosaic": "cudnn" is refused.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: an unknown implementation, or batch dims that differ.

    Example:
      >>> from jaxkern.interop.jax_nn import dot_product_attention
      >>> x = jnp.eye(3)[None, :, None]
      >>> bool(jnp.allclose(dot_product_attention(x, x, x, is_causal=True),
      ...                   jax.nn.dot_product_attention(x, x, x, is_causal=True)))
      True
    """
    with as_asked("dot_product_attention", implementation):
        out, lse = attend_as_jax_nn(
            "dot_product_attention",
            *(query, key, value, bias, mask),
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            scale=scale,
        )
    return (out, lse) if return_residual else out


@takes_holders
def ragged_dot(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Integer[Array, " g"],
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    out_sharding: jax.sharding.NamedSharding | jax.P | None = None,
) -> Float[Array, "m n"]:
    """`jax.lax.ragged_dot`, by `jaxkern.grouped_matmul`.

        out[i] = lhs[i] rhs[g]   for the rows i of group g;  0 behind the last group

    Weights come as `[g, k, n]`, output-major `[g, n, k]` is what the kernels read:
    XLA turns them where they are made, or once for each call. Keep them as `[g, n, k]`
    and call `jaxkern.grouped_matmul` where that costs, or `ragged_dot_general`.

    Args:
      lhs, rhs, group_sizes, precision, preferred_element_type: as in JAX.
      group_offset: an integer, `[]` or `[1]`, which JAX has in its signature and does
        not implement. `rhs[i]` is then the weight of group `group_offset + i`, and may
        have fewer groups than `group_sizes`; rows of groups that it lacks are 0.
      out_sharding: of the result on an explicit mesh, where it is resharded. Without
        it the result is cut as its operands are.

    Raises:
      TypeError: shapes or dtypes do not fit; whole numbers, which JAX's own takes.

    Example:
      >>> from jaxkern.interop.jax_nn import ragged_dot
      >>> rhs = jnp.array([1.0, 10.0]).reshape(2, 1, 1)
      >>> ragged_dot(jnp.ones((3, 1)), rhs, jnp.array([1, 2]))[:, 0]
      Array([ 1., 10., 10.], dtype=float32)
    """
    with as_asked("ragged_dot", None, precision):
        y = ragged_product(
            *("ragged_dot", lhs, rhs, group_sizes, ROWS_IN_GROUPS),
            *(preferred_element_type, group_offset),
        )
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


@takes_holders
def ragged_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    group_sizes: Integer[Array, "... g"],
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    out_sharding: jax.sharding.NamedSharding | jax.P | None = None,
) -> Float[Array, "..."]:
    """`jax.lax.ragged_dot_general`, by `jaxkern.grouped_matmul` and its gradient.

        [b, x, m, k], [g, b, k, n], sizes [b, x, g] -> [b, x, m, n]   rows in groups
        [b, x, k, m], [b, x, k, n], sizes [b, x, g] -> [g, b, m, n]   sums in groups
        [b, m, k], [b, k, n], sizes [g] -> [b, m, n]                batches in groups

    Any number of dims each, in any order; sizes `[g]` are those of every b and x. Which
    of the three it is `lhs_ragged_dimensions` says: a kept dim of lhs, a summed or a
    batch dim. The first is `grouped_matmul`, the second the gradient of its weights.
    The third is `jax.lax.dot_general`, for there the sizes change nothing. Batch dims,
    and x with sizes of its own, are mapped; other dims are more rows of one product.

    It differs from JAX's in that a mask of all groups is never made, that rows behind
    the last group are 0 on every platform, and that every mode differentiates, in both
    directions. Sums are float32 and rounded once. A rhs whose summed dims are its last
    ones, as `[g, n, k]`, is read as it is.

    Args:
      lhs, rhs, group_sizes, ragged_dot_dimension_numbers: as in JAX.
      precision, preferred_element_type: as in JAX.
      group_offset, out_sharding: as in `ragged_dot`.

    Raises:
      TypeError: what JAX refuses, in its words; whole numbers, which JAX's own takes.
      NotImplementedError: a `group_offset` where rhs has no groups.

    Example:
      >>> from jaxkern.interop.jax_nn import ragged_dot_general
      >>> summed = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
      >>> x, y = jnp.ones((5, 1)), jnp.arange(5.0)[:, None]
      >>> ragged_dot_general(x, y, jnp.array([2, 3]), summed)[:, 0, 0]
      Array([1., 9.], dtype=float32)
    """
    with as_asked("ragged_dot_general", None, precision):
        y = ragged_product(
            *(
                "ragged_dot_general",
                lhs,
                rhs,
                group_sizes,
                ragged_dot_dimension_numbers,
            ),
            *(preferred_element_type, group_offset),
        )
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
