"""Cross entropy of logits = x weight^T + bias without the logits in memory.

By blocks of the vocabulary, as in https://arxiv.org/abs/2411.09009.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.embedding import explicit_spec
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.loss.cross_entropy import (
    as_class,
    capped,
    check_options,
    log_sum_exp,
    logits_gradient,
    loss_of_sums,
    reduced,
    sums_gradient,
)


@check_arguments
def linear_cross_entropy(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    labels: Integer[Array, "..."],
    bias: Float[Array, " v"] | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    reduction: str = "none",
    return_lse: bool = False,
    block_size: int | None = None,
) -> Float[Array, "..."] | tuple[Array, Array]:
    """`cross_entropy(x @ weight.T + bias, labels)`, logits made and used by blocks.

        dx = sum over blocks of dlogits weight,    dweight = dlogits^T x,
        dbias = sum over tokens of dlogits

    The largest arrays in memory are `[..., block_size]` float32, forward and backward,
    beside dx in float32; the logits of a block are computed twice, once for lse and
    once for the gradient. Products accumulate in float32. Second derivatives and
    forward mode followed by a transpose keep all logits.

    Args:
      x: `[..., d]`, any float dtype: the last hidden states.
      weight: `[v, d]`, a row per class, as checkpoints store the output embedding.
      labels: `[...]`, any integer dtype.
      bias: `[v]`, any float dtype, added to the logits before the softcap; or None. No
        kernel takes one.
      label_smoothing, z_loss, softcap, ignore_index, reduction, return_lse: see
        cross_entropy.
      block_size: how many classes at once, at least 1; None for as many as make 2**27
        logits (0.5 GB in float32), but at least 4096.

    Returns:
      loss: `[...]`, or a scalar with a reduction; float32.
      lse: `[...]` float32; only with return_lse.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an option out of range.

    Example:
      >>> x = jnp.array([[1.0, 0.0]])
      >>> weight = jnp.array([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
      >>> jaxkern.linear_cross_entropy(x, weight, jnp.array([0]))
      Array([0.408], dtype=float32)
      >>> jaxkern.cross_entropy(x @ weight.T, jnp.array([0]))  # all logits at once
      Array([0.408], dtype=float32)
    """
    op = "linear_cross_entropy"
    check_options(op, label_smoothing, z_loss, softcap, reduction)
    if block_size is not None and block_size < 1:
        raise ValueError(f"{op}: `block_size` must be at least 1, got {block_size}.")
    loss, lse = linear_cross_entropy_p(
        x,
        weight,
        labels,
        bias,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        ignore_index=ignore_index,
        block_size=block_size,
    )
    loss = reduced(loss, labels, ignore_index, reduction)
    return (loss, lse) if return_lse else loss


def linear_cross_entropy_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    labels: Integer[Array, "..."],
    bias: Float[Array, " v"] | None,
    *,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    ignore_index: int | None,
    block_size: int | None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    label = as_class(labels)
    starts, block = blocks_of(label.size, weight, block_size)

    def step(sums, start):
        lse, picked, total = sums
        rows, classes, fresh = rows_at(weight, start, block)
        z = capped(logits_of(x, rows, biases_at(bias, classes)), softcap)
        in_block = log_sum_exp(jnp.where(fresh, z, -jnp.inf))
        lse = log_sum_exp(jnp.stack([lse, in_block], axis=-1))
        on_label = fresh & (label[..., None] == classes)
        picked = picked + jnp.sum(jnp.where(on_label, z, 0), axis=-1)
        total = total + jnp.sum(jnp.where(fresh, z, 0), axis=-1)
        return (lse, picked, total), None

    zero = jnp.zeros_like(label, logits_dtype(x, weight))  # sharded as labels
    zero, *_ = same_manual_axes([zero, x, weight])
    sums, _ = lax.scan(step, (zero - jnp.inf, zero, zero), starts)
    lse, picked, total = sums
    v = weight.shape[0]
    options = (label_smoothing, z_loss, ignore_index)
    return loss_of_sums(lse, picked, total, label, v, *options), lse


def linear_cross_entropy_bwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    labels: Integer[Array, "..."],
    bias: Float[Array, " v"] | None,
    loss: Float[Array, "..."],
    lse: Float[Array, "..."],
    dloss: Float[Array, "..."],
    dlse: Float[Array, "..."],
    *,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    ignore_index: int | None,
    block_size: int | None,
) -> tuple[Float[Array, "... d"], Float[Array, "v d"], Float[Array, " v"] | None]:
    del loss
    label = as_class(labels)
    starts, block = blocks_of(label.size, weight, block_size)
    v = weight.shape[0]
    options = (label_smoothing, z_loss, ignore_index)
    factors = sums_gradient(lse, dloss, dlse, label, v, *options)
    x32 = at_least_f32(x)

    def step(gradients, start):
        dx, dweight, dbias = gradients
        rows, classes, fresh = rows_at(weight, start, block)
        on_label = label[..., None] == classes
        logits = logits_of(x, rows, biases_at(bias, classes))
        dlogits = logits_gradient(logits, on_label, *factors, softcap)
        dlogits = jnp.where(fresh, dlogits, 0)
        dx = dx + jnp.einsum("...v,vd->...d", dlogits, at_least_f32(rows))
        new = jnp.einsum(
            "...v,...d->vd", dlogits, x32, out_sharding=explicit_spec(None, None)
        )
        first = jnp.minimum(start, v - block)
        old = lax.dynamic_slice_in_dim(dweight, first, block)
        new = jnp.where(fresh[:, None], new.astype(weight.dtype), old)
        dweight = lax.dynamic_update_slice_in_dim(dweight, new, first, 0)
        if dbias is not None:  # what is not fresh adds nothing
            tokens = tuple(range(dlogits.ndim - 1))
            new = lax.dynamic_slice_in_dim(dbias, first, block) + dlogits.sum(tokens)
            dbias = lax.dynamic_update_slice_in_dim(dbias, new, first, 0)
        return (dx, dweight, dbias), None

    sum_dtype = logits_dtype(x, weight)
    sums = [jnp.zeros_like(x, sum_dtype), jnp.zeros_like(weight)]
    if bias is not None:
        sums.append(jnp.zeros_like(bias, sum_dtype))
    dx, dweight, *others = same_manual_axes([*sums, x])
    dbias = None if bias is None else others[0]
    (dx, dweight, dbias), _ = lax.scan(step, (dx, dweight, dbias), starts)
    if bias is not None and dbias is not None:
        dbias = dbias.astype(bias.dtype)
    return dx.astype(x.dtype), dweight, dbias


def logits_dtype(x, weight):
    return jnp.result_type(x.dtype, weight.dtype, jnp.float32)


def logits_of(x, rows, biases=None):
    logits = jnp.einsum(
        "...d,vd->...v", x, rows, preferred_element_type=logits_dtype(x, rows)
    )
    return logits if biases is None else logits + biases.astype(logits.dtype)


def biases_at(bias, classes):
    """Of a block of classes, as `rows_at` has them."""
    if bias is None:
        return None
    return lax.dynamic_slice_in_dim(bias, classes[0], classes.shape[0])


def size_of_blocks(num_tokens: int, v: int, block_size: int | None) -> int:
    """`block_size`, or blocks of about equal size for which products are fast."""
    if block_size is None:
        known = isinstance(num_tokens, int)  # not symbolic
        most = max(2**27 // max(num_tokens, 1), 4096) if known else 4096
        num_blocks = max(-(-v // most), 1)
        block_size = -(-v // (256 * num_blocks)) * 256
    return min(block_size, v)


def blocks_of(num_tokens, weight, block_size):
    """Where the blocks of classes start, and their size."""
    v = weight.shape[0]
    block = size_of_blocks(num_tokens, v, block_size)
    return jnp.arange(0, v, max(block, 1)), block


def rows_at(weight, start, block):
    """A block of rows, their classes, and which of them no earlier block had.

    The last block begins early enough to be whole, so that nothing is padded.
    """
    first = jnp.minimum(start, weight.shape[0] - block)
    classes = first + jnp.arange(block)
    rows = lax.dynamic_slice_in_dim(weight, first, block)
    return rows, classes, classes >= start


linear_cross_entropy_p = kernel_primitive(
    linear_cross_entropy_reference,
    bwd=linear_cross_entropy_bwd_reference,
    replicated=("v", "d"),  # each token needs every class
)
