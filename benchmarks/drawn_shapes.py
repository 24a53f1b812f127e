"""Operators on shapes, dtypes and options drawn at random: ours, XLA and cuDNN.

    python -m benchmarks drawn_shapes [--seconds 60] [--seed N] [--only OP ...]
    python -m benchmarks drawn_shapes --seed 7 --draw 41       # one of them again
    python -m benchmarks drawn_shapes --check                  # values alone, no GPU
    python -m benchmarks drawn_shapes --read DIR               # what runs left by --out

A benchmark's shapes are those it was tuned on; these lie between. Of each draw our
results are compared with float64 first, then "auto" is timed in turn with XLA's
compilation of the reference and, for attention, cuDNN: forward, and backward in a share
of the draws. The promise is to be level with the best of them, or to leave the call to
XLA and say why. Operators take turns; seed and number name a draw.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from rich.progress import Progress

from benchmarks._drawn import attention, choices, products, rows, sequences
from benchmarks._drawn.measure import Outcome, from_json, outcome_of
from benchmarks._drawn.report import (
    failed_peers,
    left_to_xla,
    losses_table,
    summary_table,
    wrong_table,
)
from benchmarks._records import write_run
from benchmarks._report import CONSOLE, machine, versions

FAMILIES = {
    "attention": attention.GENERATORS,
    "rows": rows.GENERATORS,
    "products": products.GENERATORS,
    "choices": choices.GENERATORS,
    "sequences": sequences.GENERATORS,
}
OPS = {op: draw for family in FAMILIES.values() for op, draw in family.items()}
ELEMENTS = {"gpu": 2**26}  # of the largest operand; elsewhere 2**14


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks drawn_shapes")
    parser.add_argument("--seconds", type=float, default=60.0, help="when to stop")
    parser.add_argument("--draws", type=int, help="stop after so many, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=int, help="the number of one draw")
    parser.add_argument("--only", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--check", action="store_true", help="compare values alone")
    parser.add_argument("--elements", type=int, help="of the largest operand, about")
    parser.add_argument("--out", type=Path, help="folder for every figure, as JSON")
    parser.add_argument("--read", type=Path, help="show the runs in a folder")
    return parser.parse_args(arguments)


def numbers(options: argparse.Namespace) -> Iterator[int]:
    """Of the draws to make: number i is of the operator i modulo their count."""
    if options.draw is not None:
        return iter([options.draw])
    ops = list(OPS)
    mine = (i for i in itertools.count() if ops[i % len(ops)] in options.only)
    return itertools.islice(mine, options.draws)


def outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    """One after the other until the time is up."""
    end, ops = time.perf_counter() + options.seconds, list(OPS.items())
    elements = options.elements or ELEMENTS.get(jax.default_backend(), 2**14)
    for i in numbers(options):
        op, generate = ops[i % len(ops)]
        yield outcome_of(op, generate, options.seed, i, elements, not options.check)
        if time.perf_counter() > end:
            return


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    if options.read:
        show(kept(options.read))
        return 0
    if not options.check and jax.default_backend() != "gpu":
        print(
            "python -m benchmarks drawn_shapes: needs a GPU, found "
            f"{jax.default_backend()}. `--check` compares values alone."
        )
        return 2
    found: list[Outcome] = []
    begin = time.perf_counter()
    with Progress(console=CONSOLE, transient=True) as progress:
        bar = progress.add_task("drawing", total=options.seconds)
        for outcome in outcomes(options):
            found.append(outcome)
            took = time.perf_counter() - begin
            said = f"{len(found)} draws, {outcome.op}"
            progress.update(bar, completed=took, description=said)
            if outcome.wrong or outcome.failed:
                said = outcome.wrong or outcome.failed
                said = f"draw {outcome.index}, {outcome.op}: {said}"
                progress.print(said, markup=False)
            if options.out:  # after each: a run that is cut short leaves the others
                write_run(record(options, found), options.out)
    show(found)
    took = time.perf_counter() - begin
    CONSOLE.print(f"{len(found)} draws of seed {options.seed} in {took:.0f} s")
    return int(any(o.wrong or o.failed for o in found))


def kept(folder: Path) -> list[Outcome]:
    """The draws of every run in it."""
    files = sorted(folder.glob("drawn_shapes_*.json"))
    runs = [json.loads(file.read_text()) for file in files]
    return [from_json(draw) for run in runs for draw in run["draws"]]


def show(found: Sequence[Outcome]) -> None:
    for table in (wrong_table(found), losses_table(found)):
        if table.row_count:
            CONSOLE.print(table)
    CONSOLE.print(summary_table(found, FAMILIES))
    for line in (*left_to_xla(found), *failed_peers(found)):
        CONSOLE.print(line, markup=False)


def record(options: argparse.Namespace, found: Sequence[Outcome]) -> dict:
    return {
        "name": f"drawn_shapes_{options.seed}",
        "seed": options.seed,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "draws": [dataclasses.asdict(o) for o in found],
    }
