"""The plan of one decode step as tables: `jaxkern plan model.gguf`."""

import dataclasses
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Group
from rich.table import Table

from jaxkern import runtime
from jaxkern.models.architecture import CacheForm
from jaxkern.models.cache_kind import new_cache
from jaxkern.models.cached_steps import decode
from jaxkern.models.loader import load
from jaxkern.models.weight_reader import Policy
from jaxkern.runtime.plan.instructions import Instruction
from jaxkern.runtime.plan.profile import Profile

COUNTED = re.compile(r"\.\d+|_\d+$|\d+$")  # what XLA appends to make a name unique
EDGE = 20  # rows of the two long tables


def plan_decode_step(
    path: str | Path,
    *,
    tower: str | Path | None = None,
    weights: Policy = "auto",
    batch: int = 1,
    slots: int = 512,
    cache: CacheForm | None = None,
) -> tuple[runtime.Plan, tuple]:
    """Compiles one decode step of a model; the cache is donated, so there is one.

    Args:
      path: of a GGUF file, or of a folder of Hugging Face.
      tower: of a GGUF file, see `load`.
      weights: policy of `load`, or "auto".
      batch: sequences at a time.
      slots: tokens that the cache can hold.
      cache: what keys and values are kept in; see `jaxkern.models.cache_kind`.

    Returns:
      The plan, and arguments for it: weights, tokens, a half-filled cache.
    """
    config, loaded = load(path, weights, tower=tower)
    half = jnp.full(batch, slots // 2, jnp.int32)
    filled = tuple(
        dataclasses.replace(layer, lengths=half + 0)  # donated, so one each
        for layer in new_cache(config, batch, slots, cache)
    )
    arguments = (loaded, jnp.zeros(batch, jnp.int32), filled)
    step = functools.partial(decode, config)
    # float32 means float32: the default of a GPU rounds the factors to tf32
    precision = "highest" if config.dtype == "float32" else None
    with jax.default_matmul_precision(precision):
        plan = runtime.compile(step, *arguments, donate=2)
    return plan, arguments


def tables(plan: runtime.Plan, profile: Profile | None = None) -> Group:
    """What a step does, its instructions, its memory, and times if they were taken."""
    shown = [summary(plan, profile), instruction_table(plan, profile)]
    return Group(*shown, memory_table(plan))


def as_json(plan: runtime.Plan, profile: Profile | None = None) -> dict[str, Any]:
    """The same as plain numbers."""
    report, memory = plan.report(), plan.memory()
    found = {
        "device": plan.device.device_kind,
        "equations": sum(report.equations.values()),
        "instructions": report.instructions,
        "views": report.views,
        "kernels": report.kernels,
        "command_buffers": list(report.command_buffers.sizes),
        "bytes": sum(i.bytes * (i.runs or 1) for i in plan.instructions()),
        "flops": flops_of(plan.instructions()),
        "memory": {
            name: getattr(memory, name)
            for name in ("arguments", "outputs", "temporaries", "aliases", "peak")
        },
    }
    return found | ({"seconds": profile.seconds} if profile else {})


def summary(plan: runtime.Plan, profile: Profile | None) -> Table:
    report, moved = plan.report(), as_json(plan, profile)
    table = Table(title="One decode step", show_header=False)
    table.add_row("device", plan.device.device_kind)
    table.add_row("compiled in", f"{plan.compile_seconds:.2f} s")
    table.add_row("equations before", str(moved["equations"]))
    after = ", ".join(f"{n} {kind}" for kind, n in report.instructions.items())
    table.add_row("instructions after", f"{len(plan)}: {after}")
    table.add_row("views, free", str(report.views))
    kernels = ", ".join(f"{n} {name}" for name, n in report.kernels.items())
    table.add_row("kernels of others", kernels or "none")
    table.add_row("command buffers", str(report.command_buffers))
    table.add_row("bytes moved", f"{moved['bytes'] / 1e6:,.1f} MB")
    hidden = sum(i.flops is None for i in plan.instructions())
    unknown = f"unknown: {hidden} kernels do not say theirs"
    table.add_row(
        "arithmetic", f"{mega(moved['flops'])} MFLOP" if not hidden else unknown
    )
    if profile is not None:
        floor = moved["bytes"] / profile.limits.bytes_per_second
        table.add_row("one step takes", f"{profile.seconds * 1e3:,.2f} ms")
        table.add_row("its bytes would take", f"{floor * 1e3:,.2f} ms")
        if profile.note:
            table.add_row("profile", profile.note)
    return table


def flops_of(found: Iterable[Instruction]) -> int | None:
    """Of all together; None where one of them is a kernel that does not say its own."""
    each = [None if i.flops is None else i.flops * (i.runs or 1) for i in found]
    return None if None in each else sum(filter(None, each))


def mega(flops: int | None) -> str:
    return "unknown" if flops is None else f"{flops / 1e6:,.2f}"


def family(i: Instruction) -> tuple[str, str, str]:
    """Instructions that differ in nothing but the layer."""
    name = i.kernel or COUNTED.sub("", i.name)
    return name, i.kind, i.shape if len(i.shape) < 40 else "..."


def instruction_table(plan: runtime.Plan, profile: Profile | None) -> Table:
    """One row for all that do the same in every layer, the most bytes first."""
    times = {row.name: row.seconds for row in profile.rows} if profile else {}
    groups: dict[tuple, list[Instruction]] = {}
    for i in plan.instructions():
        if i.kind != "control":
            groups.setdefault(family(i), []).append(i)
    table = Table(title="Instructions")
    for name in ("", "kind", "result"):
        table.add_column(name, overflow="fold")
    for name in ("times", "MB", "MFLOP", *(("us",) if times else ())):
        table.add_column(name, justify="right")

    def moved(found: list[Instruction]) -> float:
        return sum(i.bytes * (i.runs or 1) for i in found)

    ordered = sorted(groups.items(), key=lambda group: -moved(group[1]))
    for key, found in ordered[:EDGE]:
        cells = [str(sum(i.runs or 1 for i in found)), f"{moved(found) / 1e6:,.3f}"]
        cells += [mega(flops_of(found))]
        if times:
            cells += [f"{sum(times.get(i.name, 0.0) for i in found) * 1e6:,.1f}"]
        table.add_row(*key, *cells)
    if rest := ordered[EDGE:]:
        others = [i for _, found in rest for i in found]
        cells = [str(sum(i.runs or 1 for i in others)), f"{moved(others) / 1e6:,.3f}"]
        table.add_row(f"{len(rest)} more", "", "", *cells)
    return table


def memory_table(plan: runtime.Plan) -> Table:
    """Totals, then the largest places of the arena."""
    memory = plan.memory()
    table = Table(title="Memory")
    for name in ("", "bytes", "offset", "live"):
        table.add_column(name, justify="left" if not name else "right")
    for name in ("arguments", "outputs", "aliases", "temporaries", "peak"):
        table.add_row(name, f"{getattr(memory, name):,}", "", "")
    table.add_section()
    if memory.why_no_arena:
        table.add_row(memory.why_no_arena, "", "", "")
    for b in sorted(memory.arena, key=lambda b: -b.size)[:EDGE]:
        live = f"{b.first}..{b.last} of {len(memory.order)}"
        table.add_row(f"{b.name} {b.shape}"[:60], f"{b.size:,}", f"{b.offset:,}", live)
    if len(memory.arena) > EDGE:
        table.add_row(f"{len(memory.arena) - EDGE} more places", "", "", "")
    return table
