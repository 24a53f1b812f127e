"""`jax.lax.ragged_dot_general` as grouped products.

Rows in groups are multiplied by the weight of their group (`grouped_matmul`), or what
is summed over lies in groups, and each has its own sum (the gradient of its weights).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.call import (
    NO_MESH,
    Call,
    backend_context,
    same_manual_axes,
)
from jaxkern.primitives.dense_product import result_dtype
from jaxkern.primitives.moe.grouped_matmul import grouped_matmul, grouped_matmul_p

Numbers = lax.RaggedDotDimensionNumbers
ROWS_IN_GROUPS = Numbers((((1,), (1,)), ((), ())), (0,), (0,))
"""`[m, k]` and `[g, k, n]` to `[m, n]`, as in `ragged_dot`."""


@dataclasses.dataclass(frozen=True)
class Dims:
    """What the dims of both operands are; those of a pair stand in the same order.

    Attributes:
      batch, summed: pairs, (of lhs, of rhs) each.
      kept: of lhs and of rhs, of neither kind and not the group.
      group: of rhs, or () where it has none.
      cut: the dim of lhs that lies in groups.
    """

    batch: Sequence[Sequence[int]]
    summed: Sequence[Sequence[int]]
    kept: Sequence[Sequence[int]]
    group: Sequence[int]
    cut: int

    @classmethod
    def of(cls, numbers: Numbers, lhs_ndim: int, rhs_ndim: int) -> "Dims":
        summed, batch = numbers.dot_dimension_numbers
        group = numbers.rhs_group_dimensions
        taken = {*batch[0], *summed[0]}, {*batch[1], *summed[1], *group}
        kept = tuple(
            tuple(i for i in range(n) if i not in t)
            for n, t in zip((lhs_ndim, rhs_ndim), taken, strict=True)
        )
        return cls(batch, summed, kept, group, numbers.lhs_ragged_dimensions[0])


def ragged_product(
    op: str,
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    numbers: Numbers,
    preferred_element_type: DTypeLike | None,
    group_offset: Array | None,
) -> Array:
    """`lax.ragged_dot_general` of these, and its refusals under the name `op`."""
    lhs, rhs = (float_array(op, n, x) for n, x in (("lhs", lhs), ("rhs", rhs)))
    sizes = jnp.asarray(group_sizes)
    offset = offset_of(op, group_offset)
    dtype = checked_dtype(
        op, lhs, rhs, sizes, numbers, preferred_element_type, offset is not None
    )
    if sizes.dtype.itemsize < 4:
        sizes = sizes.astype(jnp.int32)  # their sums would wrap
    dims = Dims.of(numbers, lhs.ndim, rhs.ndim)
    if dims.cut in dims.kept[0]:
        return rows_in_groups(lhs, rhs, sizes, dims, offset, dtype)
    if offset is not None:
        raise NotImplementedError(
            f"{op}: `group_offset` says which groups rhs has, and rhs has no group "
            f"dimension in {numbers}."
        )
    if dims.cut in dims.summed[0]:
        return sums_in_groups(lhs, rhs, sizes, dims, dtype)
    return lax.dot_general(
        lhs, rhs, numbers.dot_dimension_numbers, preferred_element_type=dtype
    )


def float_array(op: str, name: str, x: Any) -> Array:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"{op}: `{name}` must be an array, got {type(x).__name__}. Quantised "
            "weights are for `jaxkern.grouped_matmul`, in containers of jaxkern."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{op}: `{name}` must have a float dtype, got {x.dtype}{list(x.shape)}. "
            f"jax.lax.{op} takes others."
        )
    return jnp.asarray(x)


def offset_of(op: str, offset: Any) -> Integer[Array, ""] | None:
    """One number of JAX's shape `[]` or of tokamax's `[1]`."""
    if offset is None:
        return None
    offset = jnp.asarray(offset)
    if offset.shape not in ((), (1,)) or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(
            f"{op}: `group_offset` must be one integer, got "
            f"{offset.dtype}{list(offset.shape)}."
        )
    return offset.reshape(())


def checked_dtype(
    op: str,
    lhs: Array,
    rhs: Array,
    sizes: Array,
    numbers: Numbers,
    preferred: DTypeLike | None,
    has_offset: bool,
) -> jnp.dtype:
    """The dtype of the result; what JAX's own function refuses is refused in its words.

    With an offset rhs has some of the groups, so that many sizes are what fits it.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs, sizes)]
    if has_offset and numbers.rhs_group_dimensions and sizes.ndim:
        groups = rhs.shape[numbers.rhs_group_dimensions[0]]
        if groups > sizes.shape[-1]:
            raise TypeError(
                f"{op}: rhs has {groups} groups, `group_sizes` only {sizes.shape[-1]}."
            )
        cut = (*sizes.shape[:-1], groups)
        shapes[2] = jax.ShapeDtypeStruct(cut, sizes.dtype)
    if preferred is not None:
        result_dtype(op, preferred, preferred)
    f = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=numbers,
        preferred_element_type=preferred,
    )
    try:
        with jax.sharding.use_abstract_mesh(NO_MESH):  # it infers no explicit sharding
            return jax.eval_shape(f, *shapes).dtype
    except TypeError as error:
        raise TypeError(
            f"{op}: {error} Operands are {lhs.shape}, {rhs.shape} and group_sizes "
            f"{sizes.shape} with {numbers}."
        ) from error


def split(dims: Sequence[int], cut: int, sizes: Array) -> tuple[tuple, tuple]:
    """Of the dims in order around `cut`: (those with sizes of their own, the others).

    Group sizes `[g]` are those of all, and the order in which rows of a group stand is
    no matter: all are others then.
    """
    at = dims.index(cut)
    outer, inner = tuple(dims[:at]), tuple(dims[at + 1 :])
    return ((), outer + inner) if sizes.ndim == 1 else (outer, inner)


def arranged(x: Array, *parts: Sequence[int]) -> Array:
    """`x` with one dim for each part, the dims of a part in their order."""
    order = [i for part in parts for i in part]
    shape = [math.prod(x.shape[i] for i in part) for part in parts]
    return x.transpose(order).reshape(shape)


def sizes_of_rows(sizes: Array, x: Array, inner: int) -> Array:
    """`[b, x, g]`: how many rows each group has, of which `inner` lie together."""
    own = (x.shape[0], x.shape[1], sizes.shape[-1])
    each = sizes if sizes.ndim == 1 else sizes.reshape(own)
    return jnp.broadcast_to(each * inner, own)


def extent(x: Array, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(x.shape[i] for i in dims)


def mapped(f: Callable, axes: tuple[int | None, ...]) -> Callable:
    """`jax.vmap`, and `f` itself over a dim of 1, for which kernels need no batch."""

    def over(*arrays: Array) -> Array:
        if len(arrays[0]) != 1:
            return jax.vmap(f, axes)(*arrays)
        one = [x if a is None else x[0] for x, a in zip(arrays, axes, strict=True)]
        return f(*one)[None]

    return over


def rows_in_groups(
    lhs: Array,
    rhs: Array,
    sizes: Array,
    dims: Dims,
    offset: Array | None,
    dtype: jnp.dtype,
) -> Array:
    """`[b, x, m, k]`, `[b, g, n, k]` and sizes `[b, x, g]` to `[b, x, m, n]`."""
    outer, inner = split(dims.kept[0], dims.cut, sizes)
    x = arranged(lhs, dims.batch[0], outer, (dims.cut, *inner), dims.summed[0])
    w = arranged(rhs, dims.batch[1], dims.group, dims.kept[1], dims.summed[1])
    rows = sizes_of_rows(sizes, x, math.prod(extent(lhs, inner)))
    both = jnp.promote_types(x.dtype, w.dtype)
    product = functools.partial(from_group, offset=offset, dtype=dtype)
    over = mapped(mapped(product, (0, None, 0)), (0, 0, 0))
    y = over(x.astype(both), w.astype(both), rows)
    made = (*dims.batch[0], *outer, dims.cut, *inner)
    wanted = (*dims.batch[0], *dims.kept[0])
    y = y.reshape(*extent(lhs, made), *extent(rhs, dims.kept[1]))
    order = [made.index(i) for i in wanted]
    return y.transpose(*order, *range(len(made), y.ndim))


def from_group(
    x: Float[Array, "m k"],
    w: Float[Array, "e n k"],
    sizes: Integer[Array, " g"],
    offset: Array | None,
    dtype: jnp.dtype,
) -> Float[Array, "m n"]:
    """`w[i]` is of group offset + i; rows of groups that w does not have are 0."""
    product = functools.partial(grouped_matmul, preferred_element_type=dtype)
    if offset is None:
        return product(x, w, sizes)
    ends = jnp.minimum(jnp.cumsum(sizes), len(x))  # of groups that x has
    before = jnp.pad(jnp.pad(ends, (1, 0)), (0, len(w)), mode="edge")
    first, last = (lax.dynamic_slice_in_dim(before, offset + i, len(w)) for i in (0, 1))
    y = product(jnp.roll(x, -first[0], 0), w, last - first)
    return jnp.roll(y, first[0], 0)


def sums_in_groups(
    lhs: Array, rhs: Array, sizes: Array, dims: Dims, dtype: jnp.dtype
) -> Array:
    """`[b, x, k, m]`, `[b, x, k, n]` and sizes `[b, x, g]` to `[g, b, m, n]`."""
    outer, inner = split(dims.summed[0], dims.cut, sizes)
    order = [dims.summed[0].index(i) for i in (*outer, dims.cut, *inner)]
    pairs = [dims.summed[1][i] for i in order]
    own, others = tuple(pairs[: len(outer)]), tuple(pairs[len(outer) :])
    x = arranged(lhs, dims.batch[0], outer, (dims.cut, *inner), dims.kept[0])
    y = arranged(rhs, dims.batch[1], own, others, dims.kept[1])
    rows = sizes_of_rows(sizes, x, math.prod(extent(lhs, inner)))
    both = jnp.promote_types(x.dtype, y.dtype)
    # parts of a sum are rounded once they are added
    part = jnp.promote_types(dtype, jnp.float32) if x.shape[1] > 1 else dtype
    sums = functools.partial(outer_products, dtype=part)
    for _ in ("outer", "batch"):
        sums = mapped(sums, (0, 0, 0))
    total = sums(x.astype(both), y.astype(both), rows).sum(1).astype(dtype)
    total = jnp.moveaxis(total, 1, 0)
    shape = extent(lhs, dims.batch[0]), extent(lhs, dims.kept[0])
    return total.reshape(len(total), *shape[0], *shape[1], *extent(rhs, dims.kept[1]))


def outer_products(
    x: Float[Array, "k m"],
    y: Float[Array, "k n"],
    sizes: Integer[Array, " g"],
    *,
    dtype: jnp.dtype,
) -> Float[Array, "g m n"]:
    """The sum of `x[i] y[i]^T` over the rows of each group.

    That is the gradient of weights of which rows y make rows x.
    """
    weights = jnp.zeros((len(sizes), x.shape[1], y.shape[1]), dtype)
    bwd = grouped_matmul_p.bwd
    assert bwd is not None
    call = Call(backend_context.value, wanted=(False, True))
    operands = same_manual_axes([y, weights, sizes, x])
    [gradient] = bwd.bind(*operands, call=call, preferred_element_type=None)
    return gradient
