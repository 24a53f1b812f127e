"""Cross entropy of logits = x weight^T + bias without the logits in memory.

By blocks of the vocabulary, as in https://arxiv.org/abs/2411.09009.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.embedding import explicit_spec
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.loss.class_blocks import (
    biases_at,
    blocks_of,
    logits_dtype,
    logits_of,
    rows_at,
)
from jaxkern.primitives.loss.cross_entropy import (
    TokenOptions,
    as_class,
    capped,
    check_options,
    log_sum_exp,
    logits_gradient,
    loss_of_sums,
    reduced,
    reduced_weight,
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
) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`cross_entropy(x @ weight.T + bias, labels)`, logits made and used by blocks.

        dx = sum over blocks of dlogits weight,    dweight = dlogits^T x,
        dbias = sum over tokens of dlogits

    The largest arrays in memory are `[..., block_size]` float32, forward and backward,
    beside dx in float32; the logits of a block are computed twice, once for lse and
    once for the gradient. Products accumulate in float32. Second derivatives and
    forward mode followed by a transpose keep all logits.

    With a reduction, and without `return_lse`, `block_size`, bias or float16, the
    forward pass of a derivative makes dx and dweight too, and the backward pass
    multiplies them by the cotangent of the sum. NVIDIA GPUs then make the logits once,
    for an eighth of the tokens at a time (at least 512), in the dtype of the operands:
    three products for four. dweight is a sum over eight groups at most: in float32 if
    x or weight is, else in bfloat16, rounded after each. Of 8192 tokens, 1024 dims and
    16384 classes its error is about 4.7e-3 of its norm, with whole logits 3.2e-3, by
    blocks 1.7e-3; a sum in float32 would take twice the bytes of weight. With
    `block_size` everything is by blocks of classes.

    Source: https://arxiv.org/abs/2411.09009.

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
    options: dict[str, Any] = dict(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        ignore_index=ignore_index,
    )
    by_tokens = reduction != "none" and not return_lse and block_size is None
    if by_tokens and bias is None and jnp.float16 not in (x.dtype, weight.dtype):
        factor = reduced_weight(labels, ignore_index, reduction, x.dtype)
        return summed_linear_cross_entropy_p(x, weight, labels, factor, **options)
    loss, lse = linear_cross_entropy_p(
        x, weight, labels, bias, block_size=block_size, **options
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


linear_cross_entropy_p = kernel_primitive(
    linear_cross_entropy_reference,
    bwd=linear_cross_entropy_bwd_reference,
    replicated=("v", "d"),  # each token needs every class
)


def summed_linear_cross_entropy_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    labels: Integer[Array, "..."],
    factor: Float[Array, "..."],
    **options: Unpack[TokenOptions],
) -> Float[Array, ""]:
    """The sum of factor * loss, whose backward pass makes no logits."""
    loss, _ = linear_cross_entropy_p(
        x, weight, labels, None, block_size=None, **options
    )
    return jnp.sum(loss * factor.astype(loss.dtype))


def summed_linear_cross_entropy_fwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, "v d"],
    labels: Integer[Array, "..."],
    factor: Float[Array, "..."],
    **options: Unpack[TokenOptions],
) -> tuple[
    Float[Array, ""], Float[Array, "... d"], Float[Array, "v d"], Float[Array, "..."]
]:
    """(the sum, its gradients of x and weight, loss), by `linear_cross_entropy`."""

    def summed(x, weight):
        loss, _ = linear_cross_entropy_p(
            x, weight, labels, None, block_size=None, **options
        )
        return jnp.sum(loss * factor.astype(loss.dtype)), loss

    total, pull, loss = jax.vjp(summed, x, weight, has_aux=True)
    dx, dweight = pull(jnp.ones_like(total))
    return total, dx, dweight, loss


def summed_linear_cross_entropy_bwd_reference(
    factor: Float[Array, "..."],
    dx: Float[Array, "... d"],
    dweight: Float[Array, "v d"],
    loss: Float[Array, "..."],
    dsum: Float[Array, ""],
    **options: Unpack[TokenOptions],
) -> tuple[Float[Array, "... d"], Float[Array, "v d"], Float[Array, "..."]]:
    del options  # in the gradients
    return (
        (dx * dsum).astype(dx.dtype),
        (dweight * dsum).astype(dweight.dtype),
        (loss * dsum).astype(factor.dtype),
    )


summed_linear_cross_entropy_p = kernel_primitive(
    summed_linear_cross_entropy_reference,
    fwd=summed_linear_cross_entropy_fwd_reference,
    bwd=summed_linear_cross_entropy_bwd_reference,
    replicated=("v", "d"),
    bwd_replicated=("...",),  # dweight is summed over the tokens
    calls=(linear_cross_entropy_p,),
)
