"""Where the figure of a goal stands, and whether it meets the goal.

A figure is what a run has just measured or, where the run has none, the newest one of
benchmarks/records that answers the goal: of the run of all goals (goals.json), or of
its own benchmark.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._goal_list import GOALS, JAXKERN, At, Goal
from benchmarks._records import RECORDS, Figure, Row, Section, number
from benchmarks._report import BYTES_ONLY, PASSES, Record, share_of_limit

COLUMNS = ["benchmark", "case", "figure", "goal", "measured", "met", "by"]
MET = COLUMNS.index("met")
NOT_MEASURED = "not measured"
CARD = "h200"
OTHER_CARD = "h100"  # whose shares and ratios stand in where there are none
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
RATES = ("tokens/s", "TFLOP/s")
RECORDED = {  # modules whose figures stand in a record of another name
    "gpu_generate": "generate",
    "compile_time": "generate",
    "decode_devices": "train_devices",
}
BY_HAND = (  # whole models, training, two GPUs: `goals` reads what they left
    *RECORDED,
    "train_devices",
    "train_references",
    "train_step",
)
PRODUCTS = (  # cases of one name have several sections
    "affine_matmul",
    "fp8",
    "int_matmul",
    "interleaved_matmul",
    "linear",
    "microscaled",
)


class Found(NamedTuple):
    """What was measured of a goal's case.

    Attributes:
      by: figures, in `unit`, by whose they are.
      unit: of `_records.py`; "" of errors.
      date, source: when, and by which benchmark.
      share, tflops: of ours, where they are known.
      limit: what the bytes allow, in `unit`.
      megabytes: of temporaries.
    """

    by: Mapping[str, float]
    unit: str
    date: str
    source: str
    share: float | None = None
    tflops: float | None = None
    limit: float | None = None
    megabytes: float | None = None


def in_seconds(row: dict[str, Any], which: str) -> float | None:
    """Seconds of a pass or of both, or an error; None where there is none."""
    if which == "both" and "both" not in row:
        if "forward" not in row or "backward" not in row:
            return None
        return row["forward"] + row["backward"]
    return row.get(which)


def in_run(goal: Goal, run: Record) -> Found | None:
    """Of what a benchmark has just measured."""
    if "results" not in run:
        return in_sections(goal, run, goal.case, goal.which)
    rows = run["results"].get(goal.case, {})
    seconds = {name: in_seconds(row, goal.which) for name, row in rows.items()}
    ours = seconds.get(goal.ours)
    if ours is None:
        return None
    is_error = goal.which.endswith("error")
    scale = 1.0 if is_error else 1e6
    by = {name: scale * s for name, s in seconds.items() if s is not None}
    unit, date = ("" if is_error else "us"), run.get("date", "")
    if goal.which not in PASSES:
        taken = rows[goal.ours].get("temporaries")
        return Found(by, unit, date, goal.record, megabytes=taken)
    share = 100 * share_of_limit(run, goal.case, goal.which, ours)
    flops = run["cases"][goal.case].get("flops", (0, 0))[PASSES.index(goal.which)]
    rate = flops / ours * 1e-12 if flops else None
    return Found(by, unit, date, goal.record, share, rate)


def in_sections(
    goal: Goal, record: dict[str, Any], case: str, which: str
) -> Found | None:
    """The newest row of a record that answers the goal, of one day the last.

    A section that names no run may have the case in other dtypes: it counts where a
    goal says so, and for scripts.
    """
    found, runs = None, {"goals", goal.record}
    at_hand = (*BY_HAND, *PRODUCTS)
    if goal.module in at_hand or goal.at == (case, which):
        runs.add("")
    for section in record["sections"]:
        rows = {
            row["pass"]: row
            for row in section["rows"]
            if row.get("case") == case and row.get("run", goal.record) == goal.record
        }
        if section.get("run", "") not in runs or not (row := row_of(rows, which)):
            continue
        found = better(goal, of_row(goal, row, section), found)
    return found


def better(goal: Goal, one: Found | None, other: Found | None) -> Found | None:
    """The one that answers; of two that do the newer, of one day the first."""
    if one is None or other is None:
        return one or other
    one_answers, other_answers = answers(goal, one), answers(goal, other)
    if one_answers != other_answers:
        return one if one_answers else other
    return other if other.date > one.date else one


def row_of(rows: Mapping[str, Row], which: str) -> Row | None:
    """The row of a pass; of both, if they were not measured so, the sum of two."""
    if which != "both" or "both" in rows:
        return rows.get(which)
    if "sum" in rows:
        return rows["sum"]
    if not rows.keys() >= set(PASSES):
        return None
    forward, backward = (rows[which] for which in PASSES)
    sums: dict[str, Figure] = {
        name: a + b
        for name, figure in forward["by"].items()
        if (a := number(figure)) is not None
        and (b := number(backward["by"].get(name))) is not None
    }
    return backward | {"by": sums, "beside": {}}


def of_row(goal: Goal, row: Row, section: Section) -> Found:
    numbers = {name: number(figure) for name, figure in row["by"].items()}
    by = {name: x for name, x in numbers.items() if x is not None}
    unit = "" if row["pass"].endswith("error") else section["unit"]
    figure, beside = row["by"].get(goal.ours), row.get("beside", {})
    known = figure if isinstance(figure, dict) else {}
    ours = by.get(goal.ours)
    limit = number(beside.get("bytes" if unit == "us" else "limit"))
    share, rate = known.get("share"), known.get("tflops")
    if share is None and limit and ours:
        share = 100 * (ours / limit if unit in RATES else limit / ours)
    if unit == "TFLOP/s":
        rate = ours
    source = "goals" if section.get("run") == "goals" else goal.module
    date = row.get("date", section["date"])
    megabytes = number(beside.get("temporaries, MB"))
    return Found(by, unit, date, source, share, rate, limit, megabytes)


def answers(goal: Goal, found: Found) -> bool:
    """Whether it has ours and what the goal compares it with."""
    if goal.ours not in found.by:
        return False
    if goal.than:
        return any(name in found.by for name in goal.than)
    needed = {"share": found.share, "tflops": found.tflops, "of_bytes": found.limit}
    return all(
        value is not None
        for name, value in needed.items()
        if getattr(goal, name) is not None
    )


def in_records(goal: Goal, folder: Path) -> Found | None:
    """The newest that answers; of one day that of the run of all goals."""
    own = RECORDED.get(goal.module, goal.module)
    its, known = At(goal.case, goal.which), goal.at
    found = None
    for op, at in (("goals", its), (own, its), (own, known)):
        file = folder / f"{op}.json"
        if at and file.exists():
            record = json.loads(file.read_text())
            found = better(goal, found, in_sections(goal, record, *at))
    return found


def outcome(goal: Goal, found: Found | None) -> tuple[str, bool]:
    """What was measured, in words, and whether it meets the goal."""
    if found is None or goal.ours not in found.by:
        return NOT_MEASURED, False
    shown = amount(found.by[goal.ours], found.unit)
    if goal.ours != JAXKERN:
        shown = f"{goal.ours} {shown}"
    if goal.times is not None:
        return compared(goal, found, shown)
    if goal.share is not None:
        return shared(goal, found, shown)
    if goal.of_bytes is not None:
        return beside_bytes(goal, found, shown)
    if goal.tflops is not None:
        return in_tflops(goal, found, shown)
    if goal.tokens is not None:
        rate = found.by[goal.ours]
        return shown, found.unit == "tokens/s" and rate >= goal.tokens
    return timed(goal, found, shown)


def compared(goal: Goal, found: Found, shown: str) -> tuple[str, bool]:
    """Beside the best of the others; of errors, beside the largest."""
    ours = found.by[goal.ours]
    present = {name: found.by[name] for name in goal.than if name in found.by}
    if not present or goal.times is None:
        return f"{shown}; none to compare with", False
    most = max(present, key=lambda name: present[name])
    least = min(present, key=lambda name: present[name])
    if goal.which.endswith("error"):
        ratio = ours / present[most]
        return f"{shown}, {most} {present[most]:.2e}: {ratio:.2f}", ratio <= goal.times
    best = most if found.unit in RATES else least
    theirs = present[best]
    times = ours / theirs if found.unit in RATES else theirs / ours
    beside = amount(theirs, found.unit).partition(" ")[0]
    return f"{shown}, {best} {beside}: {times:.3f}", times >= goal.times


def shared(goal: Goal, found: Found, shown: str) -> tuple[str, bool]:
    if found.share is None or goal.share is None:
        return f"{shown}; its share is not known", False
    said = f"{shown}: {found.share:.1f} %"
    for name in (BYTES_ONLY, f"plain, {BYTES_ONLY}"):
        if name in found.by:
            said += f", {BYTES_ONLY} {found.by[name]:.1f}"
    return said, found.share >= goal.share


def beside_bytes(goal: Goal, found: Found, shown: str) -> tuple[str, bool]:
    if found.limit is None or goal.of_bytes is None:
        return f"{shown}; the time of its bytes is not known", False
    ours = found.by[goal.ours]
    times = found.limit / ours if found.unit in RATES else ours / found.limit
    said = f"{shown}, its bytes {amount(found.limit, found.unit)}: {times:.2f}"
    return said, times <= goal.of_bytes


def in_tflops(goal: Goal, found: Found, shown: str) -> tuple[str, bool]:
    if found.tflops is None or goal.tflops is None:
        return f"{shown}; its TFLOP/s are not known", False
    if found.unit != "TFLOP/s":
        shown += f": {found.tflops:.0f} TFLOP/s"
    return shown, found.tflops >= goal.tflops


def timed(goal: Goal, found: Found, shown: str) -> tuple[str, bool]:
    """At most so long, and in so much memory where the goal says so."""
    most, unit = at_most(goal)
    if found.unit not in SECONDS:
        return f"{shown}; no time is known", False
    met = found.by[goal.ours] * SECONDS[found.unit] <= most * SECONDS[unit]
    if goal.megabytes is None:
        return shown, met
    if found.megabytes is None:
        return f"{shown}; its memory is not known", False
    said = f"{shown}, {found.megabytes:g} MB"
    return said, met and found.megabytes <= goal.megabytes


def at_most(goal: Goal) -> tuple[float, str]:
    for bound, unit in ((goal.us, "us"), (goal.ms, "ms"), (goal.seconds, "s")):
        if bound is not None:
            return bound, unit
    raise ValueError(f"goals: {goal} has no bound: give it one.")


def amount(value: float, unit: str) -> str:
    if not unit:
        return f"{value:.2e}"
    digits = {"us": 1, "ms": 1, "s": 2}.get(unit, 0)
    return f"{value:.{digits}f} {unit}"


def bound(goal: Goal) -> str:
    if goal.tflops is not None:
        return f">= {goal.tflops:g} TFLOP/s"
    if goal.tokens is not None:
        return f">= {goal.tokens:g} tokens/s"
    if goal.share is not None:
        return f">= {goal.share:g} % of the limit"
    if goal.of_bytes is not None:
        return f"<= {goal.of_bytes:g} x its bytes"
    if goal.times is not None:
        sign = "<=" if goal.which.endswith("error") else ">="
        return f"{sign} {goal.times:g} x {' or '.join(goal.than)}"
    most, unit = at_most(goal)
    memory = f" in {goal.megabytes:g} MB" if goal.megabytes is not None else ""
    return f"<= {most:g} {unit}{memory}"


def found_of(goal: Goal, runs: Path | None, folder: Path) -> Found | None:
    """Of a run that has just measured the case, else of the records."""
    file = runs / f"{goal.record}.json" if runs else None
    if file and file.exists() and (found := in_run(goal, json.loads(file.read_text()))):
        return found
    found = in_records(goal, folder)
    if (found and answers(goal, found)) or not is_relative(goal):
        return found
    other = in_records(goal, folder.parent / OTHER_CARD)
    if other is None or not answers(goal, other):
        return found
    return other._replace(source=f"{other.source} on {OTHER_CARD}")


def is_relative(goal: Goal) -> bool:
    """Whether its bound is a share or a ratio, which another card tells as well."""
    return (goal.times, goal.share, goal.of_bytes) != (None,) * 3


def judged(
    runs: Path | None = None,
    folder: Path = RECORDS / CARD,
    goals: Iterable[Goal] = GOALS,
) -> Iterator[list[str]]:
    """A line of each goal, as `COLUMNS` has it."""
    for goal in goals:
        found = found_of(goal, runs, folder)
        came, met = outcome(goal, found)
        by = f"{found.source}, {found.date}" if found else ""
        if goal.module in BY_HAND and not found:
            by = goal.module
        verdict = "yes" if met else "NO"
        yield [goal.record, goal.case, goal.which, bound(goal), came, verdict, by]
