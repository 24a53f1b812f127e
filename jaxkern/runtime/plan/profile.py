"""Where the time of a call goes: JAX's profiler, read per instruction.

XLA annotates what it runs with the instruction's name, on a CPU and on a GPU. A CUDA
graph is one event, so what is traced on a GPU is compiled without them.
"""

import collections
import dataclasses
import functools
import re
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.runtime.plan.record import PlanRecord

profiling = threading.Lock()  # jax has one profiler
NO_EVENTS = {
    "cpu": "The trace names no instruction: XLA ran the function as one.",
    "gpu": "The trace has no kernel: CUPTI is missing, or another profiler holds it.",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device can do at most, as measured.

    Attributes:
      bytes_per_second: read and written by a large copy.
      flops_per_second: of a large product, bfloat16 on a GPU, float32 on a CPU.
    """

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, bytes: float, flops: float) -> float:
        """The least time that so much work can take."""
        return max(bytes / self.bytes_per_second, flops / self.flops_per_second)


@functools.cache
def measured_limits(device: jax.Device) -> Limits:
    """Measures a device once per process; takes about a second.

    Example:
      >>> from jaxkern import runtime
      >>> found = runtime.measured_limits(jax.devices()[0])
      >>> found.bytes_per_second > 1e8, found.flops_per_second > 1e8
      (True, True)
    """
    on_cpu = device.platform == "cpu"
    # both larger than any cache
    elements, n = (1 << 25, 1024) if on_cpu else (1 << 28, 8192)
    with jax.default_device(device):
        x = jnp.zeros(elements, jnp.float32)
        bytes_per_second = 2 * x.nbytes / best_seconds(jnp.negative, x)
        a = jnp.ones((n, n), jnp.float32 if on_cpu else jnp.bfloat16)
        flops_per_second = 2 * n**3 / best_seconds(jnp.dot, a, a)
    return Limits(bytes_per_second, flops_per_second)


def best_seconds(f, *args: jax.Array) -> float:
    run = jax.jit(f).lower(*args).compile()
    jax.block_until_ready(run(*args))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """All executions of one instruction in one call.

    Attributes:
      name, kind, kernel: of the instruction.
      runs: executions in one call.
      seconds: of all of them together.
      bytes, flops: likewise; flops None where a kernel hides them.
      share: of the measured limit, 1 being as fast as the device can.
    """

    name: str
    kind: str
    kernel: str | None
    runs: float
    seconds: float
    bytes: float
    flops: float | None
    share: float


class Span(NamedTuple):
    """One execution on the timeline of the last call; seconds from its first."""

    name: str
    lane: str
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the time of one call goes.

    Attributes:
      rows: one per instruction, the slowest first; the sum over threads or streams.
      seconds: of one whole call, host and device, measured without the profiler.
      limits: that `share` is of.
      timeline: executions of the last profiled call.
      note: why there are no rows, or "".
    """

    rows: tuple[KernelTime, ...]
    seconds: float
    limits: Limits
    timeline: tuple[Span, ...]
    note: str

    def __str__(self) -> str:
        lines = [f"one call takes {self.seconds * 1e6:,.1f} us"]
        for row in self.rows:
            lines.append(
                f"{row.seconds * 1e6:10.1f} us {row.bytes / 1e6:10.3f} MB "
                f"{row.share:7.1%} of the limit  {row.runs:g}x {row.name} ({row.kind})"
            )
        return "\n".join([*lines, self.note] if self.note else lines)


def dispatch_seconds(plan: PlanRecord, args: tuple, calls: int) -> float:
    """What `Plan.dispatch_overhead` documents."""
    if not args:
        args = jax.tree.map(zeros, plan.compiled.in_avals[0])
    idle = jax.jit(lambda *_: jnp.int32(0), keep_unused=True)
    run = idle.lower(*args).compile()
    jax.block_until_ready(run(*args))
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        out = run(*args)
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(out)
    return statistics.median(seconds)


def zeros(aval: Any) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)


def profile_executable(
    plan: PlanRecord, args: tuple, calls: int, limits: Limits | None
) -> Profile:
    """What `Plan.profile` documents."""
    if calls < 1:
        raise ValueError(f"profile: `calls` must be at least 1, got {calls}.")
    limits = limits or measured_limits(plan.device)
    every = iter([fresh(plan, args) for _ in range(2 * calls + 2)])
    traced = plan.uncaptured
    for one in (plan, traced):
        # the first call loads kernels
        jax.block_until_ready(one.compiled(*next(every)))
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(plan.compiled(*next(every)))
    seconds = (time.perf_counter() - start) / calls
    with profiling, tempfile.TemporaryDirectory(prefix="jaxkern-") as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the host down
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                for _ in range(calls):
                    jax.block_until_ready(traced.compiled(*next(every)))
        except RuntimeError as error:
            raise RuntimeError(
                f"profile: jax's profiler is in use, stop the other profile: {error}"
            ) from error
        files = list(Path(folder).rglob("*.xplane.pb"))
        on_gpu = plan.platform != "cpu"
        events = [e for f in files for e in read_events(f, traced.module.name, on_gpu)]
    rows = kernel_times(traced, events, calls, limits)
    note = "" if rows else NO_EVENTS["gpu" if on_gpu else "cpu"]
    return Profile(rows, seconds, limits, last_call(events, calls), note)


def fresh(plan: PlanRecord, args: tuple) -> tuple:
    """Arguments that a call may destroy: donated ones copied."""
    donated = set(plan.compiled.donate_argnums)
    if not donated:
        return args
    leaves, tree = jax.tree.flatten(args)
    copied = [jnp.copy(x) if n in donated else x for n, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, copied)


class Event(NamedTuple):
    instruction: str
    lane: str
    start: float  # nanoseconds
    duration: float


def read_events(file: Path, module: str, on_gpu: bool) -> list[Event]:
    """Executions in a trace, on the GPU or on the host."""
    with warnings.catch_warnings():
        # jaxlib's iterator of statistics has no __module__
        warnings.simplefilter("ignore", DeprecationWarning)
        data = jax.profiler.ProfileData.from_file(str(file))
        planes = [p for p in data.planes if p.name.startswith("/device:") == on_gpu]
        return [e for p in planes for e in events_of(p, module, on_gpu)]


def events_of(plane: Any, module: str, on_gpu: bool) -> Iterator[Event]:
    lines = list(plane.lines)
    # a GPU's streams; other lines repeat their events in groups
    streams = [line for line in lines if line.name.startswith("Stream")]
    for line in streams or lines:
        last: dict[str, float] = {}
        named = []
        for event in line.events:
            stats = dict(event.stats)
            # a kernel without annotation still has its name
            name = stats.get("hlo_op") or (event.name if on_gpu else None)
            if name and stats.get("hlo_module", module) == module:
                named.append((event.start_ns, -event.duration_ns, str(name)))
        for start, duration, name in sorted(named):
            if start < last.get(name, -1.0):
                continue  # the part of an execution that is already counted
            last[name] = start - duration
            yield Event(name, line.name, start, -duration)


def kernel_times(
    plan: PlanRecord, events: Sequence[Event], calls: int, limits: Limits
) -> tuple[KernelTime, ...]:
    seconds: collections.Counter[str] = collections.Counter()
    runs: collections.Counter[str] = collections.Counter()
    for event in events:
        seconds[event.instruction] += event.duration * 1e-9  # type: ignore[assignment]
        runs[event.instruction] += 1
    known = {kernel_name(i.name): i for i in plan.instructions()}
    known |= {i.name: i for i in plan.instructions()}
    rows = []
    for name, total in seconds.items():
        i, times, each = known.get(name), runs[name] / calls, total / calls
        if i is None:
            rows.append(KernelTime(name, "unlisted", None, times, each, 0, None, 0.0))
        elif i.kind != "control":  # the time of a loop is that of its body
            moved, flops = i.bytes * times, None if i.flops is None else i.flops * times
            share = limits.seconds(moved, flops or 0) / each if each else 0.0
            rows.append(
                KernelTime(name, i.kind, i.kernel, times, each, moved, flops, share)
            )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def kernel_name(instruction: str) -> str:
    """What XLA calls the kernel of an instruction, where that must be an identifier."""
    return re.sub(r"\W", "_", instruction)


def last_call(events: Sequence[Event], calls: int) -> tuple[Span, ...]:
    ordered = sorted(events, key=lambda e: e.start)
    last = ordered[len(ordered) - len(ordered) // calls :]
    begin = last[0].start if last else 0.0
    return tuple(
        Span(e.instruction, e.lane, (e.start - begin) * 1e-9, e.duration * 1e-9)
        for e in last
    )
