"""Embedding: y[i] = table[ids[i]], and the sum of dy by id as its gradient."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.check_indices import OUTSIDE, check_indices
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def embedding(
    ids: Integer[Array, "..."],
    table: Float[Array, "v d"],
    *,
    out_of_bounds: str = "zeros",
) -> Float[Array, "... d"]:
    """Rows of a table by their numbers.

        y[i] = table[ids[i]],    dtable[r] = sum of dy[i] over all i with ids[i] = r

    The gradient is one XLA scatter-add of all rows, in float32 and rounded once, so a
    frequent id loses nothing in bfloat16. On a CPU XLA adds in the order of the ids,
    the same in every run; on a GPU in any order, unless its flag
    `xla_gpu_deterministic_ops` is set. A GPU kernel takes large tables: it sorts the
    ids and adds in a fixed order.

    An id outside [0, v), negative ones included, is not an error unless asked for:
    traced values cannot raise. (`jnp.take` gives NaN there, and -1 is the last row.)

    Args:
      ids: `[...]`, any integer dtype.
      table: `[v, d]`.
      out_of_bounds: what an id outside [0, v) reads: "zeros", without a gradient;
        "clip", the nearest row; "checked", an error, see `check_indices`.

    Returns:
      y: `[..., d]`, dtype of table. Zeros if the table has no row.

    Raises:
      ValueError: `out_of_bounds` is none of these.

    Example:
      >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> jaxkern.embedding(jnp.array([1, 0, -1]), table)  # -1 is no row
      Array([[3., 4.],
             [1., 2.],
             [0., 0.]], dtype=float32)
    """
    if out_of_bounds not in OUTSIDE:
        raise ValueError(
            f"embedding: `out_of_bounds` must be one of {OUTSIDE}, got "
            f"{out_of_bounds!r}."
        )
    if out_of_bounds == "checked":
        check_indices(ids, table.shape[0], name="embedding")
        out_of_bounds = "zeros"
    return embedding_p(ids, table, out_of_bounds=out_of_bounds)


def embedding_reference(
    ids: Integer[Array, "..."], table: Float[Array, "v d"], *, out_of_bounds: str
) -> Float[Array, "... d"]:
    v, d = table.shape
    if v == 0:
        return jnp.zeros((*ids.shape, d), table.dtype)
    rows, inside = nearest_rows(ids, v)
    spec = explicit_spec(
        *jax.typeof(ids).sharding.spec, jax.typeof(table).sharding.spec[1]
    )
    y = table.at[rows].get(mode="promise_in_bounds", out_sharding=spec)
    return y if out_of_bounds == "clip" else jnp.where(inside[..., None], y, 0)


def embedding_bwd_reference(
    ids: Integer[Array, "..."],
    table: Float[Array, "v d"],
    dy: Float[Array, "... d"],
    *,
    out_of_bounds: str,
) -> Float[Array, "v d"]:
    v = table.shape[0]
    if v == 0:
        return jnp.zeros_like(table)
    rows, inside = nearest_rows(ids, v)
    dy32 = at_least_f32(dy)
    if out_of_bounds == "zeros":
        dy32 = jnp.where(inside[..., None], dy32, 0)
    dtable = jnp.zeros_like(table, dy32.dtype)
    spec = explicit_spec(*jax.typeof(table).sharding.spec)
    dtable = dtable.at[rows].add(dy32, mode="promise_in_bounds", out_sharding=spec)
    return dtable.astype(table.dtype)


def explicit_spec(*cuts) -> P | None:
    """How a result is cut where types say so: JAX asks for it, and only there."""
    return P(*cuts) if jax.sharding.get_abstract_mesh().explicit_axes else None


def nearest_rows(
    ids: Integer[Array, "..."], v: int
) -> tuple[Int32[Array, "..."], Bool[Array, "..."]]:
    """The row in [0, v) nearest to each id, and whether it is the id."""
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)  # v may not fit the dtype of ids
    rows = jnp.clip(ids, 0, v - 1)
    return rows.astype(jnp.int32), rows == ids


embedding_p = kernel_primitive(
    embedding_reference,
    bwd=embedding_bwd_reference,
    replicated=("v",),  # any id may ask for any row
)
