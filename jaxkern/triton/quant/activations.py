"""Activations as the kernels of products take them: normalised, as sums of bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.triton.norm.rms_norm import rms_norm

# how many bfloat16 add up to one; the last of four is zero
TERMS = {"bfloat16": 1, "float16": 2, "float32": 4}


def terms_of(x: Any, compute_dtype: Any) -> int:
    """Terms that an activation is multiplied as: what float32 asks for, x may not."""
    if compute_dtype == jnp.bfloat16:
        return 1
    return TERMS[x.dtype.name]


def normalised(x: jax.Array, norm: jax.Array, eps: float, terms: int) -> jax.Array:
    """By a kernel of its own, in float32 where the product is to have more digits."""
    wide = x if terms == 1 else x.astype(jnp.float32)
    y = rms_norm(wide, norm, None, eps=eps, offset=0.0)
    assert y is not None
    return y


def in_terms(x: jax.Array, terms: int) -> jax.Array:
    """`[rows * terms, k]` bfloat16, of which the terms of a row add up to it."""
    if terms == 1:
        return x.astype(jnp.bfloat16)
    rest, parts = x.astype(jnp.float32), []
    for _ in range(terms):
        # a conversion there and back, which XLA would leave out
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = jnp.where(jnp.isfinite(rest), rest - part, 0.0)
    return jnp.stack(parts, axis=1).reshape(-1, x.shape[-1])


def gated(y: jax.Array, up: jax.Array | None, activation: str) -> jax.Array:
    """activation(y) * up in float32; y has both, gate first, where `up` is None."""
    y = y.astype(jnp.float32)
    gate, up = jnp.split(y, 2, axis=-1) if up is None else (y, up.reshape(y.shape))
    if activation == "silu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=True) * up
