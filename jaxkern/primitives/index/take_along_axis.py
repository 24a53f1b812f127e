"""Take along an axis: y[..., i] = x[..., indices[..., i]], by indices of each row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within
from jaxkern.primitives.index.check_indices import OUTSIDE, check_indices
from jaxkern.primitives.index.embedding import explicit_spec, nearest_rows
from jaxkern.primitives.index.rows import add_rows
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def take_along_axis(
    x: Float[Array, "..."],
    indices: Integer[Array, "..."],
    *,
    axis: int = -1,
    out_of_bounds: str = "zeros",
) -> Float[Array, "..."]:
    """Elements of x along one axis, by their numbers in each row.

        y[r, i] = x[r, indices[r, i]],    dx[r, c] = sum of dy[r, i] over all i
                                                     with indices[r, i] = c

    with r the other dims. The gradient adds what repeated indices bring, in float32, in
    the same order in every run and rounded once.

    An index outside the axis, negative ones included, is not an error unless asked for:
    traced values cannot raise. (`jnp.take_along_axis` gives NaN there, and counts -1
    from the end.)

    Args:
      x: `[..., v]` with the axis last, any float dtype.
      indices: `[..., j]`, any integer dtype; dims as x's but for the axis.
      axis: the dim that the indices number.
      out_of_bounds: what an index outside [0, v) reads: "zeros", without a gradient;
        "clip", the nearest element; "checked", an error, see `check_indices`.

    Returns:
      y: shape of indices, dtype of x. Zeros if v is 0.

    Raises:
      TypeError: shapes do not fit.
      ValueError: `out_of_bounds` is none of these.

    Example:
      >>> x = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
      >>> jaxkern.take_along_axis(x, jnp.array([[2], [0]]))
      Array([[3.],
             [4.]], dtype=float32)
    """
    if out_of_bounds not in OUTSIDE:
        raise ValueError(
            f"take_along_axis: `out_of_bounds` must be one of {OUTSIDE}, got "
            f"{out_of_bounds!r}."
        )
    axis = axis_within("take_along_axis", axis, x.ndim)
    if indices.ndim != x.ndim:
        raise TypeError(
            f"take_along_axis: `indices` must have the {x.ndim} dims of `x`, got shape "
            f"{indices.shape}."
        )
    if out_of_bounds == "checked":
        check_indices(indices, x.shape[axis], name="take_along_axis")
    y = take_along_axis_p(
        jnp.moveaxis(x, axis, -1),
        jnp.moveaxis(indices, axis, -1),
        clip=out_of_bounds == "clip",
    )
    return jnp.moveaxis(y, -1, axis)


def take_along_axis_reference(
    x: Float[Array, "... v"], indices: Integer[Array, "... j"], *, clip: bool
) -> Float[Array, "... j"]:
    v = x.shape[-1]
    if v == 0:
        return jnp.zeros(indices.shape, x.dtype)
    columns, inside = nearest_rows(indices, v)
    y = jnp.vectorize(take_columns, signature="(v),(j)->(j)")(x, columns)
    return y if clip else jnp.where(inside, y, 0)


def take_columns(x: Float[Array, " v"], columns: Int32[Array, " j"]):
    spec = explicit_spec(*jax.typeof(columns).sharding.spec)
    return x.at[columns].get(mode="promise_in_bounds", out_sharding=spec)


def take_along_axis_bwd_reference(
    x: Float[Array, "... v"],
    indices: Integer[Array, "... j"],
    dy: Float[Array, "... j"],
    *,
    clip: bool,
) -> Float[Array, "... v"]:
    v = x.shape[-1]
    if v == 0:
        return jnp.zeros_like(x)
    columns, inside = nearest_rows(indices, v)
    dy32 = at_least_f32(dy)
    if not clip:
        dy32 = jnp.where(inside, dy32, 0)

    def add_columns(x, columns, dy):  # [v], [j], [j] -> [v]
        return add_rows(x[:, None], columns, dy[:, None])[:, 0]

    add = jnp.vectorize(add_columns, signature="(v),(j),(j)->(v)")
    return add(jnp.zeros_like(x, dy32.dtype), columns, dy32).astype(x.dtype)


take_along_axis_p = kernel_primitive(
    take_along_axis_reference,
    bwd=take_along_axis_bwd_reference,
    replicated=("v",),  # any index may ask for any element
)
