"""The gradient of attention's bias: dS, summed over the dims that it is broadcast in.

Where that is the sum over all keys it is known without dS, from rows alone. Where dS,
[b n t s], is larger than its sum and too large to be written, the reference sums it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.operands import GradientOperands
from jaxkern.primitives.attention.attend import with_tail
from jaxkern.primitives.attention.attention import attention_bwd_reference
from jaxkern.primitives.attention.operands import AttentionOperands

MAX_SLOPES_BYTES = 2**32  # of dS, where it is only summed


def with_bias_gradient(bwd: Callable[..., tuple]) -> Callable[..., tuple]:
    """Makes `bwd`, whose fourth result is dS `[b n t s]`, return dbias in its place.

    No softmax sees what a bias adds to a whole row: dS of a row sums to what comes from
    the cotangent of lse and from the sinks. Where the bias is broadcast and dS would be
    too large, the reference sums it by rows.
    """

    @functools.wraps(bwd)
    def complete(*operands, wanted, scale, causal, window, softcap, **own):
        options = dict(scale=scale, causal=causal, window=window, softcap=softcap)
        o = GradientOperands(*operands)
        bias: Any = o.bias
        *want_others, want_bias, want_sinks = wanted
        if bias is None or not want_bias:
            wanted = *want_others, False, want_sinks
            return bwd(*operands, wanted=wanted, **options, **own)
        (b, t, n, _), s = o.query.shape, o.key.shape[1]
        of_rows = bias.shape[3] == 1
        size = b * n * t * s * bias.dtype.itemsize
        large = bias.shape != (b, n, t, s) and size > MAX_SLOPES_BYTES
        wanted = *want_others, not (of_rows or large), want_sinks
        slopes: Any
        dq, dk, dv, slopes, dsinks = bwd(*operands, wanted=wanted, **options, **own)
        if of_rows:
            slopes = sums_of_rows(o)
        elif large:
            given, saved = AttentionOperands(*operands[:-5]), operands[-5:]
            slopes = attention_bwd_reference(given, *saved, **options).bias
        axes = [i for i in range(4) if bias.shape[i] < slopes.shape[i]]
        if axes:
            slopes = jnp.sum(slopes, axes, dtype=jnp.float32, keepdims=True)
        return dq, dk, dv, slopes.astype(bias.dtype), dsinks

    return complete


def sums_of_rows(o: GradientOperands) -> jax.Array:
    """dS summed over the keys, [b n t 1]: 0 but for the sinks' share and for dlse."""
    rows = o.dlse
    if o.sinks is not None:
        taken = jnp.exp(o.sinks.astype(jnp.float32) - o.lse)
        dout = o.dout.astype(jnp.float32)
        slope = jnp.sum(with_tail(o.out, o.tail) * dout, -1) - o.dlse
        rows = rows + taken * slope
    rows = jnp.where(o.lse == -jnp.inf, 0.0, rows)
    return jnp.moveaxis(rows, 1, 2)[..., None]
