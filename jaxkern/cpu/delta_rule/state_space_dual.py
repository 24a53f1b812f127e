"""State-space duality on a CPU, by state_space_dual.h."""

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import cpu_call, refuses


def unsupported(
    x, step, a, b, c, initial_state, starts, *, chunk_size: int
) -> str | None:
    del starts, chunk_size
    return refuses(x=x, step=step, a=a, b=b, c=c, initial_state=initial_state)


def state_space_dual(x, step, a, b, c, initial_state, starts, *, chunk_size: int):
    del chunk_size  # a property of the chunked form: here there are no chunks
    rows, _, n, h = x.shape
    kept = jnp.float32 if initial_state is None else initial_state.dtype
    step, a = step.astype(jnp.float32), a.astype(jnp.float32)
    decay = jnp.exp(step * a)
    if starts is not None:
        decay = jnp.where(starts[..., None], 0, decay)
    operands = (
        jnp.zeros(0, jnp.float32) if y is None else y.astype(jnp.float32)
        for y in (x, step, decay, b, c, initial_state)
    )
    y, state = cpu_call(
        "state_space",
        [
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct((rows, n, h, b.shape[-1]), jnp.float32),
        ],
        *operands,
    )
    return y.astype(x.dtype), state.astype(kept)
