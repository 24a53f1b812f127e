"""`jax.nn.dot_product_attention` and `jax.lax.ragged_dot` by these operators.

from jaxkern.interop.jax_nn import dot_product_attention, ragged_dot
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxkern.interop.attending import attend_as_jax_nn
from jaxkern.interop.calling import as_asked
from jaxkern.primitives.moe.grouped_matmul import grouped_matmul

__all__ = ["dot_product_attention", "ragged_dot"]


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
    and call `jaxkern.grouped_matmul` where that costs.

    Raises:
      NotImplementedError: a `group_offset` or an `out_sharding`, which are not read.
      TypeError: shapes or dtypes do not fit.

    Example:
      >>> from jaxkern.interop.jax_nn import ragged_dot
      >>> rhs = jnp.array([1.0, 10.0]).reshape(2, 1, 1)
      >>> ragged_dot(jnp.ones((3, 1)), rhs, jnp.array([1, 2]))[:, 0]
      Array([ 1., 10., 10.], dtype=float32)
    """
    for name, x in (("group_offset", group_offset), ("out_sharding", out_sharding)):
        if x is not None:
            raise NotImplementedError(
                f"ragged_dot: `{name}` is not supported. Leave it out; the sharding of "
                "the result follows its operands."
            )
    dtype = jnp.result_type(lhs, rhs)
    with as_asked("ragged_dot", None, precision):
        return grouped_matmul(
            lhs.astype(dtype),
            rhs.astype(dtype).swapaxes(1, 2),
            group_sizes,
            preferred_element_type=preferred_element_type,
        )
