"""The gated delta rule on a CPU, by gated_delta_rule.h."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import cpu_call, refuses


def unsupported(**named: Any) -> str | None:
    return refuses(**{k: x for k, x in named.items() if hasattr(x, "dtype")})


def gated_delta_rule(
    query, key, value, g, beta, initial_state, *, scale: float, chunk_size: int
):
    del chunk_size  # a property of the chunked form: here there are no chunks
    b, _, n, hv = value.shape
    kept = jnp.float32 if initial_state is None else initial_state.dtype
    operands = (
        jnp.zeros(0, jnp.float32) if x is None else x.astype(jnp.float32)
        for x in (query, key, value, g, beta, initial_state)
    )
    out, state = cpu_call(
        "delta_rule",
        [
            jax.ShapeDtypeStruct(value.shape, jnp.float32),
            jax.ShapeDtypeStruct((b, n, key.shape[-1], hv), jnp.float32),
        ],
        *operands,
        scale=np.float32(scale),
    )
    return out.astype(value.dtype), state.astype(kept)
