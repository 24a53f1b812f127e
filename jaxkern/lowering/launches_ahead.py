"""The Triton launches of traced functions, compiled beside each other.

with compiled_ahead(traced.jaxpr):
    lowered = traced.lower()
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxkern.lowering.chained import as_chains, chained_p
from jaxkern.lowering.explain import bodies
from jaxkern.lowering.kernel_jaxpr import kernel_jaxpr
from jaxkern.primitives.family import KernelPrimitive


@contextlib.contextmanager
def compiled_ahead(jaxprs: Sequence[Any]) -> Iterator[None]:
    """In this block the kernels of functions compile, which one NVIDIA GPU will run.

    Elsewhere than on such a GPU it does nothing.
    """
    from jaxkern.gpu.device import assumed_capability, compute_capability
    from jaxkern.gpu.device import device_capability as of_this_machine

    if not (assumed_capability or of_this_machine()) or missing_triton():
        yield
        return
    from jaxkern.gpu.compile_ahead import Compilers

    with Compilers() as compilers:
        for jaxpr in jaxprs:
            for launch in launches_of(jaxpr):
                compilers.ask(launch, compute_capability())
        yield


def missing_triton() -> str | None:
    from jaxkern.gpu.triton_call import missing  # imports Triton

    return missing()


def launches_of(jaxpr: Any) -> Iterator[Any]:
    """Every kernel that a function launches on one GPU, as it is compiled."""
    from jaxkern.gpu.launch_chain import kernels_of, launch_chain_p
    from jaxkern.gpu.triton_call import triton_call_p

    seen = set()
    for eqn in jaxpr.eqns:
        p, inner = eqn.primitive, bodies(eqn)
        if p is triton_call_p:
            yield eqn.params["launch"]
        elif p is launch_chain_p:
            every = kernels_of(eqn.params["steps"], len(eqn.invars))
            yield from dict.fromkeys(every)
        elif p is chained_p:
            inner = [as_chains(eqn.params["jaxpr"])]
        elif isinstance(p, KernelPrimitive):
            avals = [v.aval for v in eqn.invars]
            key = p, tuple(avals), tuple(eqn.params.items())
            if key not in seen and (made := kernel_jaxpr(p, avals, **eqn.params)):
                inner = [made]
            seen.add(key)
        for body in inner:
            yield from launches_of(getattr(body, "jaxpr", body))
