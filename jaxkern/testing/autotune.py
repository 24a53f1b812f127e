"""`autotune`: which implementation of each op is the fastest on this device."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.lowering.explain import PLATFORMS, default_platform
from jaxkern.lowering.lower import choose, implementation, refusal, rows_on
from jaxkern.lowering.tuned import default_path, device_here, header, read, table_of
from jaxkern.primitives.call import Table, backend_context
from jaxkern.primitives.kernel_primitive import REWRITES
from jaxkern.runtime.plan.saved_plan import replace_file
from jaxkern.testing.agreement import disagreement, dtypes_of, exact_results
from jaxkern.testing.benchmark import alone_on, arrays_of, programs_of
from jaxkern.testing.call_sites import CallSite, call_sites
from jaxkern.testing.rounds import seconds_in_turn
from jaxkern.testing.tuning import TunedCall, Tuning

MARGIN = 0.03  # who is faster by less does not take the place of the usual choice


def autotune(
    f: Callable, *args: Any, path: str | Path | None = None, rotate: int = 1
) -> Tuning:
    """Measures the implementations of each op call in `f(*args)`, and writes a table.

    Inside of `with jaxkern.tuned(path):` these calls run what was fastest. Calls are
    the same where op, shapes, dtypes and options are, forward and backward apart. Each
    is timed alone, on the operands that it has in `f(*args)`, implementations by turns:
    the reference by XLA and every kernel that does not refuse, also those that "auto"
    leaves because they are known to be slower elsewhere. The usual choice stays where
    no other is faster by 3 %. Then f is timed as a whole, with the usual choices and
    with the new ones: XLA fuses a reference with what is around it, which no time of a
    call alone shows. While f is slower by the new ones, that which gains least alone is
    given up.

    A kernel is never chosen that does not run, or whose results differ from those of
    the reference by more than rounding: a float by more than 4 roundings of the
    coarsest dtype (5e-3 in float32, for GPUs multiply it in TF32), relative to its size
    and that of its array, unless the reference is as far from float64; of integers more
    than one in 1000.

    Args:
      f: a function that `jax.jit` takes; a model, a step of training, a gradient.
      args: pytrees of arrays on one device. What is no array reaches f as it is.
      path: of the table, which is made, or which keeps its other calls; None for the
        default of `jaxkern.tuned`.
      rotate: how many copies of a call's operands take turns: as many as overfill the
        caches, where operands come from memory in use.

    Returns:
      A `Tuning`, which prints as a table.

    Raises:
      TypeError: f is no function that `jax.jit` takes, or no argument is an array.
      ValueError: `rotate` is below 1, the arguments lie on several devices or not on
        the default one, or `path` is no table of this device and these versions.

    Example:
      >>> from jaxkern.testing import autotune
      >>> from tempfile import mkdtemp
      >>> x, path = jnp.ones((8, 64)), mkdtemp() + "/tuned.json"
      >>> found = autotune(lambda x: jaxkern.softmax(x) + 1, x, path=path)
      >>> [(call.key, call.sites) for call in found.calls]
      [('softmax(x=float32[8,64]; scale=1.0)', 1)]
    """
    if rotate < 1:
        raise ValueError(f"autotune: `rotate` must be at least 1, got {rotate}.")
    called, arrays, device = arrays_of("autotune", f, args)
    if device not in jnp.zeros(()).devices():
        raise ValueError(
            "autotune: a table is of the default device, the arguments lie on "
            f"{device}. Use jax.default_device."
        )
    file = default_path() if path is None else Path(path)
    standing(file)  # a table that does not count here is refused before it takes time
    sites, not_entered = call_sites(called, arrays)
    calls = []
    with progress_of(len(sites)) as say:
        for site in sites:
            say(site.p.name)
            if len(candidates := implementations(site)) > 1:
                calls.append(tuned_call(site, candidates, rotate, device))
    calls, whole = those_that_help(called, arrays, file, calls, device)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, [with_calls(file, calls)])
    return Tuning(file, device_here(), tuple(calls), whole, tuple(not_entered))


def implementations(site: CallSite) -> dict[str, Callable]:
    """The reference first, then each kernel that does not refuse, by name."""
    p, platform = site.p, default_platform()
    avals = [jax.typeof(x) for x in site.operands]
    options = {"call": site.call, **site.static}
    reference = functools.partial(p.evaluate, **options)
    found = {implementation(p, None): REWRITES.get(platform, lambda f: f)(reference)}
    for row in rows_on(p, platform):
        if not refusal(p, row, avals, site.call, site.static):
            kernel = functools.partial(p.evaluate_with, row.kernel, **options)
            found[implementation(p, row)] = kernel
    return found


def tuned_call(
    site: CallSite, candidates: dict[str, Callable], rotate: int, device: jax.Device
) -> TunedCall:
    avals = [jax.typeof(x) for x in site.operands]
    row = choose(site.p, default_platform(), avals, site.call, site.static).row
    usual = implementation(site.p, row)
    left = disagreeing(site, candidates)
    right = {name: f for name, f in candidates.items() if name not in left}
    copies = (tuple(map(jnp.copy, site.operands)) for _ in range(rotate - 1))
    seconds = seconds_of(right, [tuple(site.operands), *copies], device)
    us = {name: 1e6 * s for name, s in seconds.items()}
    return TunedCall(site.key, site.sites, us, left, usual, choice_of(us, usual))


def disagreeing(site: CallSite, candidates: dict[str, Callable]) -> dict[str, str]:
    """The implementations that do not compute what the reference does, and why."""
    (_, reference), *kernels = candidates.items()
    expected = jax.jit(reference)(*site.operands)
    dtypes, left = dtypes_of(site.operands, site.static), {}
    has_float64 = default_platform() in PLATFORMS
    exact = functools.cache(lambda: exact_results(reference, site.operands))
    for name, kernel in kernels:
        try:
            found = jax.block_until_ready(jax.jit(kernel)(*site.operands))
        except jax.errors.JaxRuntimeError as error:
            left[name] = f"does not run: {str(error).splitlines()[0]}"
            continue
        reason = disagreement(found, expected, dtypes, exact if has_float64 else None)
        if reason:
            left[name] = f"differs from the reference: {reason}"
    return left


def choice_of(times: Mapping[str, float], usual: str) -> str:
    fastest = min(times, key=lambda name: times[name])
    stays = usual in times and times[fastest] > (1 - MARGIN) * times[usual]
    return usual if stays else fastest


def seconds_of(
    functions: Mapping[str, Callable], sets: Sequence[tuple], device: jax.Device
) -> dict[str, float]:
    """Median seconds of a call of each, by turns."""
    programs = {name: programs_of(device)(f, [*sets]) for name, f in functions.items()}
    with alone_on(device):
        for program in programs.values():
            program.warm()
        return seconds_in_turn(programs)


def those_that_help(
    f: Callable, arrays: Any, file: Path, calls: list[TunedCall], device: jax.Device
) -> tuple[list[TunedCall], dict[str, float]]:
    """The calls, without new choices by which `f(arrays)` is slower, and its times.

    While it is, the new choice that gains least alone is given up.
    """
    calls, whole = list(calls), {}
    while new := [k for k, call in enumerate(calls) if call.choice != call.usual]:
        table = table_of("autotune", str(file), with_calls(file, calls))
        functions = {"usual": following(None, f), "tuned": following(table, f)}
        seconds = seconds_of(functions, [(arrays,)], device)
        whole = {name: 1e6 * s for name, s in seconds.items()}
        given_up = [k for k in new if calls[k].usual in calls[k].microseconds]
        if whole["tuned"] <= whole["usual"] or not given_up:
            return calls, whole
        least = min(given_up, key=lambda k: calls[k].gain)
        calls[least] = with_usual_choice(calls[least], whole)
    return calls, {}


def following(table: Table | None, f: Callable) -> Callable:
    """`f`, whose ops follow this table."""

    def run(arrays: Any) -> Any:
        asked = dataclasses.replace(backend_context.value, table=table)
        with backend_context(asked):
            return f(arrays)

    return run


def with_usual_choice(call: TunedCall, whole: Mapping[str, float]) -> TunedCall:
    """The call without an implementation that is faster alone and not in its place."""
    us = dict(call.microseconds)
    reason = (
        f"it takes {us.pop(call.choice):.4g} us alone, but with the new choices the "
        f"function takes {whole['tuned']:.4g} us, {whole['usual']:.4g} us without"
    )
    left = {**call.left, call.choice: reason}
    return dataclasses.replace(call, microseconds=us, left=left, choice=call.usual)


def standing(file: Path) -> dict[str, Any]:
    """The table that stands there, or one without calls."""
    if not file.exists():
        return header() | {"calls": {}}
    return read("autotune", str(file), file.read_bytes())


def with_calls(file: Path, calls: Sequence[TunedCall]) -> bytes:
    """The text of the table with these calls in it, whose other calls stay."""
    table, date = standing(file), time.strftime("%Y-%m-%d")
    for call in calls:
        table["calls"][call.key] = {
            "date": date,
            "microseconds": dict(call.microseconds),
            "left": dict(call.left),
            "choice": call.choice,
        }
    return json.dumps(table, indent=1).encode()


@contextlib.contextmanager
def progress_of(total: int) -> Iterator[Callable[[str], None]]:
    """A function that says which op is measured next, on a terminal."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("autotune", total=total)
        yield lambda op: bar.update(task, description=f"autotune {op}", advance=1)
