"""Sampling on a CPU; the kernel is sample.h."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import cpu_call, refuses


def unsupported(logits, **_) -> str | None:
    return refuses(logits=logits)


def sample(
    logits: jax.Array,
    uniform: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None,
    top_p: jax.Array | None,
    min_p: jax.Array | None,
) -> jax.Array:
    rows = logits.shape[:-1]

    def option(x: jax.Array | None, no_cut: float) -> jax.Array:
        return jnp.full(rows, no_cut, jnp.float32) if x is None else x.astype("float32")

    limit = np.iinfo(np.int32).max  # more than any row has
    count = jnp.zeros(rows, jnp.int32)
    if top_k is not None:
        count = jnp.clip(top_k, 0, min(limit, jnp.iinfo(top_k.dtype).max))
    return cpu_call(
        "sample",
        jax.ShapeDtypeStruct(rows, jnp.int32),
        logits,
        uniform.astype(jnp.float32),
        temperature.astype(jnp.float32),
        count.astype(jnp.int32),
        option(top_p, 1.0),
        option(min_p, 0.0),
    )
