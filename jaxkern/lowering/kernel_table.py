"""The tables of kernels: a line says which kernel an op runs, and for which passes.

    Kernel("rms_norm", "triton", "triton.norm.rms_norm", "primal fwd bwd")

Nothing is imported before an op is first asked for on the platform. A kernel module has
the same few entries: for an op `x` the functions `x` (its result alone), `x_fwd` (with
residuals) and `x_bwd` (gradients), and `unsupported` and `slower`, which give a reason
in words or None (`slower` may be the sentence itself); `unsupported_bwd` and
`slower_bwd` where the backward pass differs.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import jaxkern.primitives  # noqa: F401  declares the ops that tables name
from jaxkern.lowering.lower import (
    BACKENDS,
    Row,
    add_row_later,
    never_refuses,
    without_residuals,
)
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.primitives.leafwise_primitive import LEAFWISE

PASSES = ("primal", "fwd", "bwd")


class Kernel(NamedTuple):
    """One line of a table.

    Attributes:
      op: name of the op.
      backend: the kind of kernel.
      module: where it is, below `jaxkern.`.
      passes: for which members of the op's family it serves: "primal" for inference,
        "fwd" for the pass that saves residuals, "bwd" for gradients.
      function: name of the function where a module has several kernels of an op.
      unsupported: name of its refusal where it has one of its own.
      chain: whether its launches are one chain, as `chained` makes them.
    """

    op: str
    backend: str
    module: str
    passes: str
    function: str = ""
    unsupported: str = ""
    chain: bool = False


def add_table(platform: str, kernels: Sequence[Kernel]) -> None:
    """Announces the kernels of a platform, which are asked in this order."""
    for kernel in kernels:
        p = REGISTRY.get(kernel.op) or LEAFWISE.get(kernel.op)
        if p is None:
            raise ValueError(f"kernels of {platform}: no op is called {kernel.op!r}.")
        if kernel.backend not in BACKENDS[2:]:
            raise ValueError(f"kernels of {platform}: {kernel} has an unknown backend.")
        family = {"primal": p, "fwd": p.fwd, "bwd": p.bwd}
        for name in kernel.passes.split():
            if name not in PASSES or (member := family[name]) is None:
                raise ValueError(f"kernels of {platform}: {p.name} has no {name} pass.")
            add_row_later(member, platform, functools.partial(row_of, p, kernel, name))


def row_of(p: KernelPrimitive, kernel: Kernel, name: str) -> Row:
    """The row of one pass; imports the kernel."""
    module = importlib.import_module(f"jaxkern.{kernel.module}")
    function = function_of(p, module, kernel, name)
    return Row(
        kernel.backend,
        in_a_chain(function) if kernel.chain else function,
        refusal_of(module, kernel.unsupported or "unsupported", name),
        slower_of(module, name),
    )


def function_of(
    p: KernelPrimitive, module: ModuleType, kernel: Kernel, name: str
) -> Callable:
    if kernel.function:
        return getattr(module, kernel.function)
    if name != "primal":
        return getattr(module, f"{p.name}_{name}")
    if own := getattr(module, p.name, None):
        return own
    fwd = getattr(module, f"{p.name}_fwd")
    return fwd if p.fwd is None else without_residuals(fwd, len(p.results))


def in_a_chain(kernel: Callable) -> Callable:
    """The second launch may be resident, and read weights, before the first ends."""
    from jaxkern.lowering.chained import chained

    @functools.wraps(kernel)
    def launched(*arrays, **static):
        return chained(functools.partial(kernel, **static))(*arrays)

    return launched


def refusal_of(module: ModuleType, refusal: str, name: str) -> Callable:
    return getattr(module, f"{refusal}_{name}", None) or getattr(module, refusal)


def slower_of(module: ModuleType, name: str) -> Callable | str:
    shared = getattr(module, "slower", never_refuses)
    return getattr(module, f"slower_{name}", shared)
