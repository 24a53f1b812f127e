"""top_k on a CPU; the kernel is top_k.h."""

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import cpu_call, refuses

SHORTEST = 4096  # 1 to 2.3 times XLA below, 3 and more from there on


def unsupported(x, *, k: int) -> str | None:
    if not 1 <= k <= x.shape[-1]:
        return f"k is {k}, not from 1 to {x.shape[-1]}"
    return refuses(x=x)


def slower(x, *, k: int) -> str | None:
    del k
    short = x.shape[-1] < SHORTEST
    return f"a row has fewer than {SHORTEST} elements" if short else None


def top_k(x: jax.Array, *, k: int) -> list[jax.Array]:
    shape = (*x.shape[:-1], k)
    results = [
        jax.ShapeDtypeStruct(shape, dtype) for dtype in (x.dtype, jnp.dtype(jnp.int32))
    ]
    return cpu_call("top_k", results, x)
