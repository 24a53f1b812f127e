"""linear_cross_entropy on a CPU, both passes; the kernel is linear_cross_entropy.h."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import cpu_call, refuses
from jaxkern.primitives.loss.cross_entropy import (
    as_class,
    loss_of_sums,
    sums_gradient,
)

LOGITS_KEPT = 2**27  # that XLA keeps; of more it makes blocks, and those twice


def unsupported(x, weight, bias=None, **_) -> str | None:
    if bias is not None:
        return "`bias` is not in the kernel"
    return refuses(x=x, weight=weight)


def slower(x, weight, **_) -> str | None:
    """The same for both passes: XLA shares the logits only between two of its own."""
    if x.dtype != jnp.float32 or weight.dtype != jnp.float32:
        return f"products of {x.dtype} and {weight.dtype} (0.4 to 0.8 times)"
    if math.prod(x.shape[:-1]) * weight.shape[0] <= LOGITS_KEPT:
        return (
            f"of at most {LOGITS_KEPT} logits, kept for the gradient (0.8 to 1.5 "
            "times, the gradient 0.4 to 0.8); the kernel needs up to 0.5 GB less"
        )
    return None


def linear_cross_entropy(x, weight, labels, bias, *, softcap, block_size, **options):
    del bias  # refused
    del block_size  # logits are not kept by blocks
    label, v = as_class(labels), weight.shape[0]
    of_tokens = jax.ShapeDtypeStruct((math.prod(labels.shape),), jnp.float32)
    sums = cpu_call(
        "linear_cross_entropy",
        [of_tokens] * 3,
        *flat(x, weight, label),
        softcap=np.float32(softcap or 0),
    )
    lse, picked, total = (y.reshape(labels.shape) for y in sums)
    return loss_of_sums(lse, picked, total, label, v, **options), lse


def linear_cross_entropy_bwd(
    x, weight, labels, bias, loss, lse, dloss, dlse, *, softcap, block_size, **options
):
    del bias, loss, block_size
    label, v = as_class(labels), weight.shape[0]
    factors = sums_gradient(lse, dloss, dlse, label, v, **options)
    operands = flat(x, weight, label)
    dx, dweight = cpu_call(
        "linear_cross_entropy_gradient",
        [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in operands[:2]],
        *operands,
        *(f.astype(jnp.float32).reshape(-1) for f in factors),
        softcap=np.float32(softcap or 0),
    )
    return dx.reshape(x.shape), dweight, None


def flat(x, weight, label):
    """Tokens in one dim, and a label that no class has as -1."""
    v, d = weight.shape
    label = jnp.where((label >= 0) & (label < v), label, -1).astype(jnp.int32)
    return x.reshape(-1, d), weight, label.reshape(-1)
