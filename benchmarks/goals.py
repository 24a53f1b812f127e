"""`python -m benchmarks goals [--out DIR | --read DIR]`: what was aimed at, what came.

Runs the benchmarks that the goals of `_goal_list.py` name, with their peers, and says
of each goal what was measured and whether that meets it. With --read it takes the
records that `python -m benchmarks OP --peers --out DIR` left. What neither has is read
from benchmarks/records: whole models, training and two GPUs are measured by hand. The
last column says by which benchmark a figure is, and of when. docs/performance/goals.md
shows the lines of all records.
"""

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.table import Table

from benchmarks._find import benchmark as benchmark_of
from benchmarks._goal_list import GOALS, Goal
from benchmarks._gpu import Benchmark, run
from benchmarks._judged import (
    BY_HAND,
    COLUMNS,
    MET,
    PRODUCTS,
    Found,
    in_run,
    judged,
)
from benchmarks._records import Figure, Row, write_run
from benchmarks._report import CONSOLE, machine, versions

ALWAYS_BESIDE = (*PRODUCTS, "gated_delta_step")  # their peers need no option


def rows_of(folder: Path) -> Iterator[Row]:
    """What a run has measured of the goals, a row of each case and pass."""
    rows: dict[tuple[str, str, str], Row] = {}
    for goal in GOALS:
        file = folder / f"{goal.record}.json"
        key = goal.record, goal.case, goal.which
        if key in rows or not file.exists():
            continue
        if found := in_run(goal, json.loads(file.read_text())):
            by = figures(goal, found)
            row: Row = {"run": goal.record, "case": goal.case, "pass": goal.which}
            rows[key] = row | {"by": by}
            if found.megabytes:
                rows[key]["beside"] = {"temporaries, MB": found.megabytes}
    yield from rows.values()


def figures(goal: Goal, found: Found) -> dict[str, Figure]:
    digits = 2 if found.unit else 6
    by: dict[str, Figure] = {n: round(x, digits) for n, x in found.by.items()}
    ours: dict[str, Any] = {"value": by[goal.ours]}
    for name, value in (("share", found.share), ("tflops", found.tflops)):
        if value is not None:
            ours[name] = round(value, 1)
    return by | {goal.ours: ours}


def record_of(folder: Path) -> dict[str, Any]:
    """For `pages --add`."""
    date = time.strftime("%Y-%m-%d")
    section = {
        "run": "goals",
        "date": date,
        "unit": "us",
        "command": "python -m benchmarks goals --out DIR",
        "rows": [*rows_of(folder)],
    }
    return {
        "name": "goals",
        "op": "goals",
        "family": "goals",
        "machine": machine(),
        "date": date,
        "versions": versions(),
        "sections": [section],
    }


def commands(
    folder: Path, options: argparse.Namespace
) -> Iterator[tuple[Callable[[list[str]], int], list[str]]]:
    """Each benchmark that a goal names, and the arguments that run its cases."""
    for module_name, name in dict.fromkeys((g.module, g.record) for g in GOALS):
        if module_name in BY_HAND or (options.only and name not in options.only):
            continue
        module = benchmark_of(module_name)
        mine = [g for g in GOALS if g.record == name]
        mine = [g for g in mine if g.case in (options.shapes or [g.case])]
        # a product is a case and its activations
        found = [f"{g.case}, {g.which}" for g in mine]
        cases = found if module_name in PRODUCTS else [g.case for g in mine]
        command = ["--out", str(folder), "--shapes", *dict.fromkeys(cases)]
        if not cases:
            continue
        if module_name not in ALWAYS_BESIDE:
            command = ["--peers", *command]
        if hasattr(module, "BENCHMARK"):
            yield functools.partial(run, benchmark_named(module, name)), command
        else:
            yield module.main, command


def benchmark_named(module: ModuleType, name: str) -> Benchmark:
    found = getattr(module, "BENCHMARKS", [module.BENCHMARK])
    return next(b for b in found if b.name == name)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks goals")
    parser.add_argument("--out", type=Path, help="folder for the records and plots")
    parser.add_argument("--read", type=Path, help="folder of records to judge")
    parser.add_argument("--only", nargs="*", help="names of benchmarks to run")
    parser.add_argument("--shapes", nargs="*", help="names of cases to run")
    options = parser.parse_args(arguments)
    folder = options.read or options.out or Path(tempfile.mkdtemp())
    if not options.read:
        for benchmark, command in commands(folder, options):
            if failed := benchmark(command):
                return failed
    lines = [*judged(folder)]
    table = Table(*COLUMNS, title="goals")
    for line in lines:
        table.add_row(*line)
    CONSOLE.print(table)
    if options.out:
        write_run(record_of(folder), folder)
    met = sum(line[MET] == "yes" for line in lines)
    CONSOLE.print(f"{met} of {len(lines)} goals met; records in {folder}")
    return 0
