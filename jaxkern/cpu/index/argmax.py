"""argmax on a CPU; the kernel is argmax.h."""

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import cpu_call, refuses


def unsupported(x, *, nan_policy: str) -> str | None:
    del nan_policy
    return refuses(x=x)


def argmax(x: jax.Array, *, nan_policy: str) -> jax.Array:
    result = jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32)
    return cpu_call("argmax", result, x, nan_wins=nan_policy == "propagate")
