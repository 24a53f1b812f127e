"""Loss and both gradients of x weight^T in three products, by groups of tokens.

    dlogits = factor (softmax(logits) - one_hot(label))
    dx = dlogits weight,    dweight = sum over groups of dlogits^T x

The logits of a group are made in the dtype of the operands, as `linear` makes them, and
replaced by dlogits; cuBLAS adds each group's share of dweight to what the groups before
it left, in float32, and rounds the sum. There are at most 8 groups, so that a gradient
is rounded at most 8 times; those of 8192 tokens have 1024 each.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.loss.cross_entropy import (
    as_class,
    loss_of_sums,
    sums_gradient,
)
from jaxkern.triton.loss.cross_entropy import row_gradients, row_sums

TILE = 256  # tokens that a product's tiles have side by side
PARTS = 8  # of the tokens, of which one lies in memory


def unsupported(x: Any, weight: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if 0 in x.shape or 0 in weight.shape:
        return "there are no tokens, classes or dims"
    if jnp.float16 in (x.dtype, weight.dtype):
        return "float16 has not the range of exp(z - lse) / tokens"
    return unsupported_anywhere(x=x, weight=weight, **rest)


def size_of_groups(tokens: int) -> int:
    """An eighth of the tokens, in whole tiles, but enough for a product's rate."""
    return min(max(-(-tokens // (PARTS * TILE)), 2) * TILE, tokens)


def summed_linear_cross_entropy_fwd(x, weight, labels, factor, **options):
    d = x.shape[-1]
    label = as_class(labels)
    rows, label = x.reshape(-1, d), label.reshape(-1)
    factor = factor.reshape(-1).astype(jnp.float32)
    group = size_of_groups(label.size)

    def step(sums, start, size):
        dx, dweight, losses = sums
        part, *of_tokens = (
            lax.dynamic_slice_in_dim(a, start, size) for a in (rows, label, factor)
        )
        loss, dlogits = loss_and_gradient(part, weight, *of_tokens, **options)
        new = jnp.einsum(
            "tv,vd->td", dlogits, weight, preferred_element_type=dlogits.dtype
        )
        dx = lax.dynamic_update_slice_in_dim(dx, new.astype(dx.dtype), start, 0)
        new = jnp.einsum(
            "tv,td->vd", dlogits, part, preferred_element_type=dlogits.dtype
        )
        dweight = new if dweight is None else dweight + new
        losses = lax.dynamic_update_slice_in_dim(losses, loss, start, 0)
        return dx, dweight, losses

    zeros = jnp.zeros_like(rows), jnp.zeros(label.shape, jnp.float32)
    dx, losses, *_ = same_manual_axes([*zeros, x, weight, label, factor])
    # The rest comes last: kernels take slices of the labels that begin at 16 bytes.
    whole, rest = divmod(label.size, group)
    sums = step((dx, None, losses), 0, group)
    sums = lax.fori_loop(1, whole, lambda i, sums: step(sums, i * group, group), sums)
    if rest:
        sums = step(sums, whole * group, rest)
    dx, dweight, losses = sums
    total = jnp.sum(losses * factor)
    dweight = dweight.astype(weight.dtype)
    return total, dx.reshape(x.shape), dweight, losses.reshape(labels.shape)


def loss_and_gradient(x, weight, label, factor, *, softcap, **options):
    """The loss of each token, and factor times its gradient of the logits `[t, v]`."""
    dtype, v = jnp.promote_types(x.dtype, weight.dtype), weight.shape[0]
    logits = jnp.einsum("td,vd->tv", x, weight, preferred_element_type=dtype)
    smoothing = options["label_smoothing"]
    lse, picked, total = row_sums(logits, label, softcap, smoothing)
    loss = loss_of_sums(lse, picked, total, label, v, **options)
    factors = sums_gradient(lse, factor, jnp.zeros_like(lse), label, v, **options)
    dlogits = row_gradients(
        logits, label, factors, softcap, smoothing, dtype, in_place=True
    )
    return loss, dlogits
