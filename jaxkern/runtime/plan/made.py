"""Compiles a program, and says whether XLA did or a cache of jax had it.

Machine code that XLA for CPUs has read from disk it writes without its functions: the
file loads, and fails where one is called. So what was read is not written.
"""

import time
from threading import get_ident
from typing import Any, NamedTuple

import jax

from jaxkern.runtime.plan.compiler_dump import no_persistent_cache
from jaxkern.runtime.trace.events import subscribe


class Made(NamedTuple):
    """An executable, the seconds it took, whether jax had it, on disk or in memory."""

    executable: jax.stages.Compiled
    seconds: float
    was_read: bool


def made(
    lowered: jax.stages.Lowered,
    options: dict[str, Any] | None = None,
    began: float | None = None,
    *,
    anew: bool = False,
) -> Made:
    """What XLA makes of a program; `began` is when its tracing did.

    `anew` compiles it whatever is on disk, so that it can be written.
    """
    began, threads = began or time.perf_counter(), []
    with subscribe(lambda _: threads.append(get_ident()), kinds=("compile",)):
        if anew:
            executable = made_anew(lowered, options or {})
        else:
            executable = lowered.compile(compiler_options=options or None)
    return Made(executable, time.perf_counter() - began, get_ident() not in threads)


def made_anew(
    lowered: jax.stages.Lowered, options: dict[str, Any]
) -> jax.stages.Compiled:
    """The executable of a program, compiled whatever is on disk or in memory."""
    as_it_is = {"xla_dump_hlo_as_text": False}  # without options jax finds the old one
    with no_persistent_cache():
        return lowered.compile(compiler_options={**as_it_is, **options})
