"""Batched matrix product with a transposed second operand: y = x w^T."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.dense_product import result_dtype
from jaxkern.primitives.index.embedding import explicit_spec
from jaxkern.primitives.kernel_primitive import kernel_primitive


@check_arguments
def matmul_transpose_b(
    x: Float[Array, "... k*g t d"],
    w: Float[Array, "... k f d"],
    *,
    compute_dtype: DTypeLike | None = None,
    precision: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "... k*g t f"]:
    """Batched matrix product, the second operand stored output-major.

        y[..., i, t, f] = sum_d x[..., i, t, d] * w[..., i // g, f, d]

    g matrices of x in a row share one of w, as the query heads of a group share a key
    head; nothing is repeated in memory. Sums in float32 (float64 for float64 operands),
    rounded once.

    `compute_dtype` rounds both operands first, so that the product runs on the units
    for that dtype, as ggml's products with bfloat16 and float16 weights do; so also dy
    in the two products of the backward pass. Numbers above 65504 are inf in float16.

    Args:
      x: `[..., k*g, t, d]`, or with a w of two dims `[..., t, d]`. Any float dtype.
      w: `[..., k, f, d]`, or `[f, d]` for all of x. Any float dtype. For vectors x and
        a weight of two dims there is `linear`.
      compute_dtype: of the operands of the product; None: the dtype to which those of x
        and w promote.
      precision: "default", "high" or "highest" as in `lax.dot_general`; None: that of
        `jax.default_matmul_precision`. On a GPU float32 products use TF32 unless it is
        "highest".
      preferred_element_type: dtype of y, to which the sums are rounded; float32 gives
        the sums of operands of 16 bits themselves.

    Returns:
      y: `[..., k*g, t, f]`, dtype of x unless another is preferred.

    Raises:
      TypeError: shapes do not fit, or no float is preferred.
      ValueError: an unknown precision.

    Example:
      >>> query, key = jnp.ones((8, 3, 4)), jnp.ones((2, 5, 4))  # 8 heads, 2 key heads
      >>> jaxkern.matmul_transpose_b(query, key).shape
      (8, 3, 5)
    """
    if precision not in (None, "default", "high", "highest"):
        raise ValueError(
            "matmul_transpose_b: `precision` must be 'default', 'high', 'highest' or "
            f"None, got {precision!r}."
        )
    result = result_dtype("matmul_transpose_b", preferred_element_type, x.dtype)
    options = {
        "preferred_element_type": None if result == x.dtype else result,
        "compute_dtype": None if compute_dtype is None else jnp.dtype(compute_dtype),
        "precision": precision,
    }
    if w.ndim != 2:
        return matmul_transpose_b_p(x, w, **options)
    single = x.ndim == 2
    product = functools.partial(matmul_transpose_b_p, **options)
    for _ in range(x.ndim - 3):  # one w for all leading dims of x
        product = jax.vmap(product, (0, None))
    y = product(x[None] if single else x, w[None])
    return y[0] if single else y


def matmul_transpose_b_reference(
    x: Float[Array, "... k*g t d"],
    w: Float[Array, "... k f d"],
    *,
    compute_dtype: jnp.dtype | None,
    precision: str | None,
    preferred_element_type: jnp.dtype | None,
) -> Float[Array, "... k*g t f"]:
    groups = split_groups(x, w)
    y = _product("...kgtd,...kfd->...kgtf", groups, w, compute_dtype, precision)
    return merge_groups(y).astype(preferred_element_type or x.dtype)


def matmul_transpose_b_bwd_reference(
    x: Float[Array, "... k*g t d"],
    w: Float[Array, "... k f d"],
    dy: Float[Array, "... k*g t f"],
    *,
    compute_dtype: jnp.dtype | None,
    precision: str | None,
    preferred_element_type: jnp.dtype | None,
) -> tuple[Float[Array, "... k*g t d"], Float[Array, "... k f d"]]:
    del preferred_element_type  # dy has it
    groups, dy = split_groups(x, w), split_groups(dy, w)
    dx = _product("...kgtf,...kfd->...kgtd", dy, w, compute_dtype, precision)
    dw = _product("...kgtf,...kgtd->...kfd", dy, groups, compute_dtype, precision)
    return merge_groups(dx).astype(x.dtype), dw.astype(w.dtype)


def _product(formula, a, b, compute_dtype, precision):
    """The sums of products, not yet rounded."""
    dtype = jnp.result_type(a, b)
    operand_dtype = dtype if compute_dtype is None else compute_dtype
    return jnp.einsum(
        formula,
        a.astype(operand_dtype),
        b.astype(operand_dtype),
        precision=precision,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        out_sharding=_cut_as_operands(formula, a, b),
    )


def _cut_as_operands(formula, a, b):
    """Where types say how arrays are cut: the product, each dim as in its operand."""
    left, right, out = formula.replace("...", "").replace("->", ",").split(",")
    lead = range(a.ndim - len(left))
    cuts: dict = {}
    for letters, x in ((left, a), (right, b)):
        for name, cut in zip(
            [*lead, *letters], jax.typeof(x).sharding.spec, strict=True
        ):
            cuts[name] = cuts.get(name) or cut
    return explicit_spec(*(cuts[name] for name in [*lead, *out]))


def split_groups(
    x: Float[Array, "... k*g t d"], w: Float[Array, "... k f d"]
) -> Float[Array, "... k g t d"]:
    *lead, n, t, d = x.shape
    k = w.shape[-3]
    return x.reshape(*lead, k, n // max(k, 1), t, d)


def merge_groups(x: Float[Array, "... k g t d"]) -> Float[Array, "... k*g t d"]:
    *lead, k, g, t, d = x.shape
    return x.reshape(*lead, k * g, t, d)


matmul_transpose_b_p = kernel_primitive(
    matmul_transpose_b_reference, bwd=matmul_transpose_b_bwd_reference
)
