"""Grouped matrix product: each run of rows with its own weight, y = x w[group]^T."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.dense_product import result_dtype
from jaxkern.primitives.index.embedding import explicit_spec
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.moe.permute_tokens import take_rows
from jaxkern.primitives.moe.row_blocks import RowBlocks, row_blocks
from jaxkern.primitives.quant.dequantize import dequantize
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor


@check_arguments
def grouped_matmul(
    x: Float[Array, "r d"],
    w: Float[Array, "e f d"] | QuantizedTensor,
    group_sizes: Integer[Array, " e"],
    *,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "r f"]:
    """Multiplies sorted rows, each group of them by its own weight.

        y[i] = w[g] x[i]   for the rows i of group g;  0 behind the last group

    The first `group_sizes[0]` rows belong to group 0, the next ones to group 1, as
    `expert_order` and `permute_tokens` bring them. Any sizes are right, 0 and all rows
    too: nothing is padded to a capacity and nothing dropped. Sums in float32 (float64
    for float64 operands) at `jax.default_matmul_precision`, rounded once.

    Weights are output-major as in `linear`; `lax.ragged_dot` takes `[e, d, f]`, and
    cannot be vmapped over one operand or differentiated backward twice. On NVIDIA GPUs
    16-bit products and their gradients have kernels; XLA runs the product as a loop
    over blocks of rows of one group, with at most twice the work; where d is 1, as a
    gather. A quantised stack is decoded one expert at a time, by `quantized_matmul`;
    all of it at once, to the dtype of x, where that has 16 bits and x as many rows as
    there are experts. `grouped_matmul_fp8` takes codes of 8-bit floats as they are.

    Args:
      x: `[r, d]`, any float dtype.
      w: `[e, f, d]`, an array of any float dtype or a quantised tensor.
      group_sizes: `[e]`, any integer dtype, not negative. Rows beyond their sum are 0;
        a group that reaches beyond r ends there.
      preferred_element_type: dtype of y, to which the sums are rounded; float32 gives
        the sums of operands of 16 bits themselves. The kernels round to x's.

    Returns:
      y: `[r, f]`, dtype of x unless another is preferred.

    Raises:
      TypeError: a dim differs between operands, or no float is preferred.

    Example:
      >>> x, sizes = jnp.ones((4, 2)), jnp.array([1, 2])  # the fourth row has no group
      >>> w = jnp.array([1.0, 10.0]).reshape(2, 1, 1) * jnp.ones((2, 1, 2))
      >>> jaxkern.grouped_matmul(x, w, sizes)[:, 0]
      Array([ 2., 20., 20.,  0.], dtype=float32)
    """
    result = result_dtype("grouped_matmul", preferred_element_type, x.dtype)
    if isinstance(w, jax.Array | np.ndarray):
        other = None if result == x.dtype else result
        return grouped_matmul_p(x, w, group_sizes, preferred_element_type=other)
    wide = x.astype(jnp.promote_types(x.dtype, result))  # y is rounded to its dtype
    return multiply_quantized_groups(wide, w, group_sizes).astype(result)


def grouped_matmul_reference(
    x: Float[Array, "r d"],
    w: Float[Array, "e f d"],
    group_sizes: Integer[Array, " e"],
    *,
    preferred_element_type: jnp.dtype | None = None,
) -> Float[Array, "r f"]:
    y = multiply_groups(x, w, group_sizes, contract=1)
    return y.astype(preferred_element_type or x.dtype)


def grouped_matmul_bwd_reference(
    x: Float[Array, "r d"],
    w: Float[Array, "e f d"],
    group_sizes: Integer[Array, " e"],
    dy: Float[Array, "r f"],
    *,
    preferred_element_type: jnp.dtype | None = None,
) -> tuple[Float[Array, "r d"], Float[Array, "e f d"]]:
    del preferred_element_type  # dy has it
    dx = multiply_groups(dy, w, group_sizes, contract=0)
    dw = sum_of_outer_products(dy, x, group_sizes)
    return dx.astype(x.dtype), dw.astype(w.dtype)


def multiply_groups(x, w, group_sizes, *, contract: int) -> Float[Array, "r n"]:
    """x with `w[group]`, over dim `contract` of its two; in float32."""
    r, e = x.shape[0], w.shape[0]
    dtype = jnp.promote_types(x.dtype, w.dtype)
    sum_dtype = jnp.promote_types(dtype, jnp.float32)
    n_cut = jax.typeof(w).sharding.spec[2 - contract]
    if r == 0 or e == 0:
        spec = explicit_spec(None, n_cut)
        return jnp.zeros((r, w.shape[2 - contract]), sum_dtype, out_sharding=spec)
    blocks = row_blocks(group_sizes, r)
    if w.shape[1 + contract] == 1:  # nothing to sum: no loop
        of_group = jnp.squeeze(w, 1 + contract).astype(sum_dtype)
        y = x.astype(sum_dtype) * take_rows(of_group, blocks.group_of_row)
        return jnp.where(blocks.grouped[:, None], y, 0)

    def product(_, block):
        rows, group = block
        y = lax.dot_general(
            rows.astype(dtype),
            lax.dynamic_index_in_dim(w, group, keepdims=False).astype(dtype),
            (((1,), (contract,)), ((), ())),
            preferred_element_type=sum_dtype,
            out_sharding=explicit_spec(None, n_cut),
        )
        return None, y

    _, y = lax.scan(product, None, (in_blocks(x, blocks), blocks.group))
    return in_rows(y, blocks)


def sum_of_outer_products(dy, x, group_sizes) -> Float[Array, "e f d"]:
    """For each group the sum of dy[i] x[i]^T over its rows, in float32, in order."""
    (r, d), f, e = x.shape, dy.shape[1], group_sizes.size
    dtype = jnp.promote_types(x.dtype, dy.dtype)
    sum_dtype = jnp.promote_types(dtype, jnp.float32)
    cuts = (jax.typeof(dy).sharding.spec[1], jax.typeof(x).sharding.spec[1])
    zeros = jnp.zeros((e, f, d), sum_dtype, out_sharding=explicit_spec(None, *cuts))
    if r == 0 or e == 0:
        return zeros
    # inside shard_map the sums vary over the mesh axes that the rows vary over
    zeros, *_ = same_manual_axes([zeros, dy, x, group_sizes])
    blocks = row_blocks(group_sizes, r)

    def add(total, block):
        dy_rows, x_rows, group = block
        outer = lax.dot_general(
            dy_rows.astype(dtype),
            x_rows.astype(dtype),
            (((0,), (0,)), ((), ())),
            preferred_element_type=sum_dtype,
        )
        outer = outer + lax.dynamic_index_in_dim(total, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, outer, group, 0), None

    in_order = (in_blocks(dy, blocks), in_blocks(x, blocks), blocks.group)
    return lax.scan(add, zeros, in_order)[0]


def in_blocks(x: Float[Array, "r d"], blocks: RowBlocks) -> Float[Array, "n size d"]:
    return jnp.where(blocks.filled[..., None], take_rows(x, blocks.row), 0)


def in_rows(y: Float[Array, "n size f"], blocks: RowBlocks) -> Float[Array, "r f"]:
    n, size, f = y.shape
    rows = take_rows(y.reshape(n * size, f), blocks.place)
    return jnp.where(blocks.grouped[:, None], rows, 0)


def multiply_quantized_groups(
    x: Float[Array, "r d"],
    w: QuantizedTensor,
    group_sizes: Integer[Array, " e"],
    compute_dtype: jnp.dtype | None = None,
) -> Float[Array, "r f"]:
    if len(w.shape) != 3 or group_sizes.shape != w.shape[:1]:
        raise TypeError(
            "grouped_matmul: `w` must be [e, f, d] with a size of each group, got "
            f"{w.shape} and `group_sizes` {group_sizes.shape}."
        )
    if x.ndim != 2 or x.shape[1] != w.shape[2]:
        raise TypeError(
            f"grouped_matmul: `x` must be [r, {w.shape[2]}] as `w` is {w.shape}, got "
            f"{x.shape}."
        )
    if x.shape[0] == 0 or w.shape[0] == 0:
        return jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
    if compute_dtype is None and x.dtype.itemsize == 2 and len(x) >= w.shape[0]:
        # a product would round them so too; one kernel for all of them
        decoded = dequantize(w, dtype=x.dtype)
        return grouped_matmul_p(x, decoded, group_sizes, preferred_element_type=None)
    blocks = row_blocks(group_sizes, x.shape[0])
    w = jax.tree.map(jnp.asarray, w)  # a traced number indexes no NumPy array
    y = lax.map(
        lambda block: quantized_matmul(
            block[0], w[block[1]], compute_dtype=compute_dtype
        ),
        (in_blocks(x, blocks), blocks.group),
    )
    return in_rows(y, blocks)


grouped_matmul_p = kernel_primitive(
    grouped_matmul_reference,
    bwd=grouped_matmul_bwd_reference,
    replicated=("r", "e"),  # a group's rows may lie anywhere
)
