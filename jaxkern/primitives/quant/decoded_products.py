"""What every format computes with its decoded weights: products, rows, routed products.

A format brings its arrays, all with the same leading dims, and `decode`, which gives
the weights `[..., d]` of any part of them in a float dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Integer

from jaxkern.primitives.kernel_primitive import at_least_f32
from jaxkern.primitives.quant.rounding import divide

ACTIVATION_BLOCK = 32  # activations that share a scale
Decode = Callable[..., Any]  # (*arrays, dtype=) -> weights [..., d]


def decoded_product(
    x: Float[Array, "... n"],
    arrays: Sequence[Array],
    decode: Decode,
    axis: int,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... m"]:
    """Contracts the last dim of `x` with the given axis of the decoded `[f, d]`.

    Operands in `compute_dtype`, or exact if it is None; sums in float32 or wider; one
    rounding to x.dtype. With int8 only `x` is rounded, and only where it is the
    activation: axis 1.
    """
    dtype = operand_dtype(x, compute_dtype)
    w = decode(*arrays, dtype=dtype)
    x_in = rounded_activations(x, compute_dtype) if axis == 1 else x.astype(dtype)
    y = _dot(x_in, w, (((x.ndim - 1,), (axis,)), ((), ())), x.dtype)
    return y.astype(x.dtype)


def operand_dtype(x: Array, compute_dtype: jnp.dtype | None) -> jnp.dtype:
    """The dtype of both operands of a product."""
    if compute_dtype is None or compute_dtype == jnp.int8:
        return at_least_f32(x).dtype
    return compute_dtype


def rounded_activations(
    x: Float[Array, "... d"], compute_dtype: jnp.dtype | None
) -> Float[Array, "... d"]:
    """`x` as it enters a product: in `compute_dtype`, or rounded to int8 by blocks.

    Int8 means scale * code with scale = max |x| / 127 over each block of 32, as ggml's
    Q8_0 but for a scale in float32. Its gradient passes straight through.
    """
    if compute_dtype != jnp.int8:
        return x.astype(operand_dtype(x, compute_dtype))
    x = at_least_f32(x)
    if x.shape[-1] % ACTIVATION_BLOCK:
        raise TypeError(
            f"quantized_matmul: int8 activations need a multiple of {ACTIVATION_BLOCK} "
            f"columns, got {x.shape[-1]}. Use compute_dtype=None."
        )
    groups = x.shape[-1] // ACTIVATION_BLOCK
    blocks = x.reshape(*x.shape[:-1], groups, ACTIVATION_BLOCK)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    scale = divide(scale, 127)
    code = jnp.round(blocks / jnp.where(scale == 0, 1, scale))
    rounded = (code * scale).reshape(x.shape)
    return x + lax.stop_gradient(rounded - x)


def decoded_rows(
    ids: Integer[Array, "..."], arrays: Sequence[Array], decode: Decode, dtype: Any
) -> Float[Array, "... d"]:
    """Rows `ids` of the decoded `[v, d]`, 0 where an id is negative or >= v."""
    rows, inside = _gathered(ids, arrays)
    return jnp.where(inside[..., None], decode(*rows, dtype=dtype), 0)


def routed_product(
    x: Float[Array, "... d"],
    ids: Integer[Array, "... k"],
    arrays: Sequence[Array],
    decode: Decode,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... k f"]:
    """y[..., k, :] = w[ids[..., k]] x of decoded `[e, f, d]`, 0 for an id outside.

    With up to e ids the packed experts are gathered, one for each id. With more, every
    expert is decoded once and multiplied with all of x, and its product kept where it
    was asked for: e / k times the least work, but one decoded expert of memory.
    """
    dtype, lead = operand_dtype(x, compute_dtype), tuple(range(x.ndim - 1))
    x_in = rounded_activations(x, compute_dtype)

    def product(w, dims):
        return _dot(x_in, w, dims, x.dtype).astype(x.dtype)

    def of_its_rows(*experts):
        w = decode(*experts, dtype=dtype)  # [... k f d]
        return product(w, (((x.ndim - 1,), (w.ndim - 1,)), (lead, lead)))

    def of_all(*expert):
        w = decode(*expert, dtype=dtype)  # [f d]
        return product(w, (((x.ndim - 1,), (1,)), ((), ())))

    return routed(ids, arrays, of_its_rows, of_all)


def routed(
    ids: Integer[Array, "... k"],
    arrays: Sequence[Array],
    of_its_rows: Callable[..., Array],
    of_all: Callable[..., Array],
) -> Float[Array, "... k f"]:
    """Products with the experts that are named, 0 for an id outside.

    Args:
      arrays: packed experts `[e, ...]`.
      of_its_rows: (*arrays `[..., k, ...]`, the expert of each id) -> `[..., k, f]`.
      of_all: (*arrays of one expert) -> `[..., f]`, its product with every row.
    """
    if at_most_experts(ids, arrays):
        experts, inside = _gathered(ids, arrays)
        return jnp.where(inside[..., None], of_its_rows(*experts), 0)

    def of_expert(i, *expert):
        return jnp.where((ids == i)[..., None], of_all(*expert)[..., None, :], 0)

    return _sum_over_experts(of_expert, arrays)  # at most one of them is not zero


def routed_product_transpose(
    dy: Float[Array, "... k f"],
    ids: Integer[Array, "... k"],
    arrays: Sequence[Array],
    decode: Decode,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    """dx = sum over k of w[ids[..., k]]^T dy[..., k, :]."""
    dtype, lead = operand_dtype(dy, compute_dtype), tuple(range(dy.ndim - 2))
    if at_most_experts(ids, arrays):
        experts, inside = _gathered(ids, arrays)
        w = decode(*experts, dtype=dtype)  # [... k f d]
        dy_in = jnp.where(inside[..., None], dy, 0).astype(dtype)
        kf = (dy.ndim - 2, dy.ndim - 1)
        return _dot(dy_in, w, ((kf, kf), (lead, lead)), dy.dtype).astype(dy.dtype)

    def of_expert(i, *expert):
        asked = jnp.where((ids == i)[..., None], at_least_f32(dy), 0)
        w = decode(*expert, dtype=dtype)  # [f d]
        dims = (((dy.ndim - 2,), (0,)), ((), ()))
        return _dot(jnp.sum(asked, axis=-2).astype(dtype), w, dims, dy.dtype)

    return _sum_over_experts(of_expert, arrays).astype(dy.dtype)


def at_most_experts(ids: Integer[Array, "..."], arrays: Sequence[Array]) -> bool:
    """Are there at most e ids? A symbolic number counts as more."""
    return isinstance(ids.size, int) and ids.size <= arrays[0].shape[0]


def _dot(x: Array, w: Array, dims: Any, dtype: Any) -> Array:
    """The product with sums in `dtype`, or in float32 if that is wider."""
    return lax.dot_general(
        x,
        w,
        dims,
        precision=lax.Precision.HIGHEST,  # float32 means float32, not tf32
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )


def _gathered(
    ids: Integer[Array, "..."], arrays: Sequence[Array]
) -> tuple[list[Array], Bool[Array, "..."]]:
    """Packed `array[ids]` of each array, and which ids are in range."""
    v = arrays[0].shape[0]
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))  # int8 cannot hold v
    inside = (ids >= 0) & (ids < v)
    rows = jnp.where(inside, ids, 0)
    if v == 0:  # nothing to gather from
        arrays = [jnp.zeros((1, *a.shape[1:]), a.dtype) for a in arrays]
    sharding = jax.typeof(ids).sharding

    def gather(a: Array) -> Array:
        rest = jax.typeof(a).sharding.spec[1:]
        spec = P(*sharding.spec, *rest) if sharding.mesh.explicit_axes else None
        return a.at[rows].get(mode="clip", out_sharding=spec)

    return [gather(a) for a in arrays], inside


def _sum_over_experts(f: Callable, arrays: Sequence[Array]) -> Array:
    """f(0, *arrays[0]) + f(1, *arrays[1]) + ..., one after the other."""
    if arrays[0].shape[0] == 0:
        arrays = [jnp.zeros((1, *a.shape[1:]), a.dtype) for a in arrays]

    def step(total, expert):
        return total + f(*expert), None

    rest = (jnp.arange(1, arrays[0].shape[0]), *(a[1:] for a in arrays))
    # the first one outside the loop gives the sum its type: its sharding, its axes
    return lax.scan(step, f(0, *(a[0] for a in arrays)), rest)[0]
