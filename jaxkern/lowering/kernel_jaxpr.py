"""What ops become on a GPU, traced once however often an op is called."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxkern.lowering.lower import choose
from jaxkern.primitives.call import Call
from jaxkern.primitives.family import KernelPrimitive


def kernel_jaxpr(
    p: KernelPrimitive, avals: Sequence, *, call: Call, **static: Any
) -> Any:
    """What an op on unsharded operands launches, None where that is not by Triton."""
    from jaxkern.gpu.device import compute_capability

    row = choose(p, "cuda", avals, call, static).row
    if row is None or row.backend != "triton":
        return None
    options = tuple(static.items())
    f = kernel_function(p, row.kernel, call, options, compute_capability())
    plain = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return f.trace(*plain).jaxpr


@functools.lru_cache(maxsize=1024)
def kernel_function(
    p: KernelPrimitive, kernel: Callable, call: Call, static: tuple, capability: int
) -> Any:
    """The same function for the same op, so that JAX knows what it has traced."""
    del capability  # by which kernels choose their sizes
    return jax.jit(
        functools.partial(p.evaluate_with, kernel, call=call, **dict(static))
    )
