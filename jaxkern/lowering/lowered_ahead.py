"""Operators that are lowered before the function that calls them.

    with lowered_ahead() as add:
        add(p, row.kernel, avals, call, static)     # the bytes of its module
        traced.lower()                              # takes it from there

Mosaic infers the layouts of an attention kernel in Python, a second in which a lowering
that waits for other processes would have done nothing. The block is of its thread: what
is lowered elsewhere is lowered as ever.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from jaxkern.lowering.lowered_once import LoweredOnce
from jaxkern.primitives.call import NO_MESH, Call
from jaxkern.primitives.family import KernelPrimitive

Known = dict[tuple, LoweredOnce]
known: ContextVar[Known | None] = ContextVar("lowered_ahead", default=None)


@contextlib.contextmanager
def lowered_ahead() -> Iterator[Callable[..., bytes]]:
    """Gives a function that lowers an operator on one GPU, without a mesh."""
    made: Known = {}

    def add(
        p: KernelPrimitive,
        kernel: Callable,
        avals: Sequence[Any],
        call: Call,
        static: dict[str, Any],
    ) -> bytes:
        def run(*arrays: jax.Array) -> list:
            return p.evaluate_with(kernel, *arrays, call=call, **static)

        key = key_of(p, kernel, avals, call, static)
        once = made.get(key) or LoweredOnce(p.name, run, avals)
        module = once.module(["cuda"])  # what cannot be lowered is not added
        made[key] = once
        return module

    token = known.set(made)
    try:
        yield add
    finally:
        known.reset(token)


def find(
    p: KernelPrimitive,
    kernel: Callable,
    avals: Sequence[Any],
    call: Call,
    static: dict[str, Any],
) -> LoweredOnce | None:
    """What was added for this operator on such operands, or None."""
    made = known.get()
    if not made or any(a.sharding.mesh != NO_MESH for a in avals):
        return None
    return made.get(key_of(p, kernel, avals, call, static))


def key_of(
    p: KernelPrimitive,
    kernel: Callable,
    avals: Sequence[Any],
    call: Call,
    static: dict[str, Any],
) -> tuple:
    shapes = tuple((a.shape, a.dtype) for a in avals)
    return p, kernel, shapes, call, tuple(sorted(static.items()))
