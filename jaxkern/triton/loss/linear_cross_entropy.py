"""Cross entropy of x weight^T by blocks of classes: products by XLA, rows by kernels.

A block's logits are one cuBLAS product in float32. The kernels of cross_entropy read
them once, forward for the sums of each row, backward for dlogits in the dtype of the
operands, so that all four products run at its rate. At 8192 tokens, 4096 dims and
128256 classes a product is 8.6 TFLOP, 11 to 13 ms on an H200; beside them 8.4 GB of
logits move forward and 10.5 GB backward, 4.5 ms.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.loss.class_blocks import logits_of, size_of_blocks
from jaxkern.primitives.loss.cross_entropy import (
    as_class,
    log_sum_exp,
    loss_of_sums,
    sums_gradient,
)
from jaxkern.triton.loss.cross_entropy import row_gradients, row_sums


def unsupported(x: Any, weight: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if rest.get("bias") is not None:
        return "`bias` is not in the kernel"
    if 0 in weight.shape:
        return "there are no classes or no dims"
    return unsupported_anywhere(x=x, weight=weight)


def over_blocks(step: Callable, carry: Any, v: int, block: int) -> Any:
    """`carry = step(carry, first class, number of classes)` for each block of v."""
    num_whole, rest = divmod(v, block)
    carry = lax.fori_loop(0, num_whole, lambda i, c: step(c, i * block, block), carry)
    return step(carry, num_whole * block, rest) if rest else carry


def linear_cross_entropy_fwd(
    x, weight, labels, bias, *, softcap, block_size, **options
):
    del bias  # refused
    label = as_class(labels)
    v = weight.shape[0]

    def step(sums, start, size):
        lse, picked, total = sums
        rows = lax.dynamic_slice_in_dim(weight, start, size)
        in_block, new_picked, new_total = row_sums(
            logits_of(x, rows), label - start, softcap, options["label_smoothing"]
        )
        lse = log_sum_exp(jnp.stack([lse, in_block], axis=-1))
        total = total if new_total is None else total + new_total
        return lse, picked + new_picked, total

    zero, *_ = same_manual_axes([jnp.zeros(label.shape, jnp.float32), x, weight, label])
    block = size_of_blocks(label.size, v, block_size)
    lse, picked, total = over_blocks(step, (zero - jnp.inf, zero, zero), v, block)
    return loss_of_sums(lse, picked, total, label, v, **options), lse


def linear_cross_entropy_bwd(
    x,
    weight,
    labels,
    bias,
    loss,
    lse,
    dloss,
    dlse,
    *,
    softcap,
    block_size,
    wanted,
    **options,
):
    del bias, loss
    label = as_class(labels)
    v = weight.shape[0]
    factors = sums_gradient(lse, dloss, dlse, label, v, **options)
    dtype, smoothing = dtype_of_dlogits(x, weight), options["label_smoothing"]
    wants_dx, wants_dweight, _ = wanted

    def step(gradients, start, size):
        dx, dweight = gradients
        rows = lax.dynamic_slice_in_dim(weight, start, size)
        dlogits = row_gradients(
            logits_of(x, rows), label - start, factors, softcap, smoothing, dtype
        )
        if wants_dx:
            dx += jnp.einsum(
                "...v,vd->...d", dlogits, rows, preferred_element_type=jnp.float32
            )
        if wants_dweight:
            # cuBLAS adds in float32 and rounds once, whatever the result's dtype
            new = jnp.einsum(
                "...v,...d->vd", dlogits, x, preferred_element_type=dtype
            ).astype(weight.dtype)
            dweight = lax.dynamic_update_slice_in_dim(dweight, new, start, 0)
        return dx, dweight

    dx = jnp.zeros(x.shape if wants_dx else (), jnp.float32)
    dweight = jnp.zeros(weight.shape if wants_dweight else (), weight.dtype)
    dx, dweight, *_ = same_manual_axes([dx, dweight, x])
    block = size_of_blocks(label.size, v, block_size)
    dx, dweight = over_blocks(step, (dx, dweight), v, block)
    dx = dx.astype(x.dtype) if wants_dx else None
    return dx, dweight if wants_dweight else None, None


def dtype_of_dlogits(x: jax.Array, weight: jax.Array) -> Any:
    """That of the operands; float16 has not the range of exp(z - lse) / tokens."""
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    return jnp.float32 if dtype == jnp.float16 else dtype
