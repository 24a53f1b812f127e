"""The Triton launches of traced functions, compiled beside each other.

    with compiled_ahead() as ask:
        traced = [jax.jit(f).trace(*args) for f, args in calls]
        for one in traced:
            ask(one.jaxpr)
        lowered = [one.lower() for one in traced]

Lowering would compile them one after the other, as it comes to each.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxkern.gpu.compiling_process import compiling_process, most_processes
from jaxkern.gpu.device import compute_capability, device_capability
from jaxkern.lowering.chained import as_chains, chained_p
from jaxkern.lowering.explain import bodies, every_equation
from jaxkern.lowering.kernel_jaxpr import kernel_jaxpr
from jaxkern.lowering.lower import choose
from jaxkern.primitives.family import KernelPrimitive


@contextlib.contextmanager
def compiled_ahead() -> Iterator[Callable[[Any], None]]:
    """Gives a function that has the kernels of a jaxpr compiled while the block runs.

    They are those that one NVIDIA GPU will run. Elsewhere than on such a GPU, and on a
    host of one processor, it does nothing.
    """
    if not (count := num_processes()):
        yield lambda jaxpr: None
        return
    with compiling_process(count) as process:  # imports Triton while this one does
        from jaxkern.gpu import compile_ahead, triton_call

        if triton_call.missing():
            yield lambda jaxpr: None
            return
        with compile_ahead.Compilers(process) as compilers:

            def ask(jaxpr: Any) -> None:
                for launch in launches_of(jaxpr):
                    compilers.ask(launch, compute_capability())

            yield ask


def num_processes() -> int:
    """Those that may compile for this machine's GPU, 0 where it has none."""
    if jax.default_backend() != "gpu" or device_capability() is None:
        return 0
    has_triton = importlib.util.find_spec("triton") is not None
    return most_processes() if has_triton else 0


def mosaic_ops(jaxpr: Any) -> Iterator[tuple]:
    """Operators that run a Mosaic kernel on one GPU, as `lowered_ahead` takes them."""
    seen = set()
    for eqn in every_equation(jaxpr):
        if not isinstance(p := eqn.primitive, KernelPrimitive):
            continue
        avals = [v.aval for v in eqn.invars]
        if (key := (p, tuple(avals), tuple(eqn.params.items()))) in seen:
            continue
        seen.add(key)
        static = dict(eqn.params)
        call = static.pop("call")
        row = choose(p, "cuda", avals, call, static).row
        if row is not None and row.backend == "mosaic_gpu":
            yield p, row.kernel, avals, call, static


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
            inner = [as_chains(eqn.params["jaxpr"], eqn.params["peers"])]
        elif isinstance(p, KernelPrimitive):
            avals = [v.aval for v in eqn.invars]
            key = p, tuple(avals), tuple(eqn.params.items())
            if key not in seen and (made := kernel_jaxpr(p, avals, **eqn.params)):
                inner = [made]
            seen.add(key)
        for body in inner:
            yield from launches_of(getattr(body, "jaxpr", body))
