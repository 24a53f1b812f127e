"""Sampling from rows of logits: the cuts are found by counting, nothing is sorted.

Two launches: with top_k see by_groups.py, else by_chunks.py. What does not fit there
(many ties at the cut, k above 256, a row without k beside rows with it) is right and
slow: one program passes over that row up to 32 times.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.triton.sampling.sample.by_chunks import draw_by_chunks
from jaxkern.triton.sampling.sample.by_groups import draw_by_groups

LONGEST = 262_144


def unsupported(*, logits: Any, **named: Any) -> str | None:
    if logits.shape and logits.shape[-1] > LONGEST:
        return f"a row of `logits` has {logits.shape[-1]} elements, above {LONGEST}"
    return bridge.unsupported(logits=logits, **named)


def sample(
    logits: jax.Array,
    uniform: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None,
    top_p: jax.Array | None,
    min_p: jax.Array | None,
) -> jax.Array:
    if logits.size == 0:
        return jnp.zeros(uniform.shape, jnp.int32)
    draw = {
        "logits_ptr": logits,
        "uniform_ptr": uniform,
        "temperature_ptr": temperature,
    }
    cuts = {"top_p_ptr": top_p, "min_p_ptr": min_p}
    if top_k is not None:
        token = draw_by_groups(draw, {"top_k_ptr": top_k} | cuts)
    else:
        token = draw_by_chunks(draw, cuts)
    return token.reshape(uniform.shape)
