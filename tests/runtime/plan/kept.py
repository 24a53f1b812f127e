"""A small call that is kept, for the tests of `kept_calls` and `kept_files`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern import softcap
from jaxkern.models.decode_loop import compiled_in_turn
from jaxkern.runtime.plan import kept_calls
from jaxkern.runtime.trace.events import subscribe

X = jnp.linspace(-3, 3, 8)


def capped(cap: float = 2.0, **options: Any) -> Any:
    """`softcap`, jitted: a new function at each call, which jax has not traced."""
    return jax.jit(functools.partial(softcap, cap=cap), **options)


def start(function: Any = None, arguments: tuple = (X,)) -> tuple[list[str], jax.Array]:
    """Kinds of events of what a process does first, and the result of the call."""
    told = []
    call = {"": (function or capped(), arguments)}
    with subscribe(told.append, kinds=("compile", "cache_hit")):
        run = compiled_in_turn(call)[""]
    kept_calls.writer.submit(int).result()  # what is written before it is on disk
    return [f"{event.kind} {event.name}" for event in told], run(*arguments)


def file_of(function: Any = None, arguments: tuple = (X,)) -> Any:
    """Where the call is or will be, or None."""
    return kept_calls.KeptCalls().file(function or capped(), arguments)
