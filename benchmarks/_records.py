"""Measured figures under records/<machine>/<op>.json, and how one becomes a cell.

A record says family, op and versions, and has sections as its page shows them:

    {"title": "rms_norm, with a weight", "run": "rms_norm", "date": "2026-11-22",
     "unit": "us", "command": "python -m benchmarks rms_norm --peers --out DIR",
     "text": [...], "rows": [...], "note": [...]}

`text` stands above the table, `note` below it, both as lines of markdown. `run` is the
name of the benchmark whose figures take the place of these. A row is what was measured
together:

    {"case": "16384x4096", "pass": "forward",
     "by": {"jaxkern": {"value": 65.4, "share": 96}, "Liger": "refuses"}}

A figure is a number in the section's unit, that number with more beside it (SHOWN), or
words. A name that begins with "jaxkern" is ours, "plain" only moves the bytes, the rest
are peers. How many times as fast ours is, is computed, unless the row has it under
`times`, from unrounded figures or with the median of rounds. Date and versions of a row
stand before those of its section, and these before the record's.
"""

import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
OURS = "jaxkern"
SHOWN = {  # beside a number, in brackets: what the heading says, how it is written
    "share": ("share of the limit", "{:g} %"),
    "tflops": ("TFLOP/s", "{:g}"),
    "median": ("median", "{}"),
    "cpu": ("time of all threads", "{}"),
    "gb_s": ("GB/s", "{}"),
}
HIGHER_IS_BETTER = ("tokens/s", "GB/s", "TFLOP/s")

Section = dict[str, Any]
Row = dict[str, Any]
Figure = dict[str, Any] | float | str


def records(folder: Path = RECORDS) -> Iterator[tuple[str, dict[str, Any]]]:
    """(machine, record) of every file but the machine's own."""
    for file in sorted(folder.glob("*/*.json")):
        if file.stem != "machine":
            yield file.parent.name, json.loads(file.read_text())


def machine(name: str, folder: Path = RECORDS) -> dict[str, Any]:
    return json.loads((folder / name / "machine.json").read_text())


def number(figure: Figure | None) -> float | None:
    """None where nothing, or only words, were recorded."""
    value = figure.get("value") if isinstance(figure, dict) else figure
    return None if value is None or isinstance(value, str) else float(value)


def is_peer(name: str) -> bool:
    return not name.startswith((OURS, "plain"))


def best_peer(row: Row, unit: str) -> str | None:
    """The fastest of those that ran."""
    found = {n: x for n, f in row["by"].items() if is_peer(n) and (x := number(f))}
    if not found:
        return None
    choose = max if unit in HIGHER_IS_BETTER else min
    return choose(found, key=lambda n: found[n])


def times(row: Row, unit: str, peer: str) -> str:
    """How many times as fast as a peer ours is; "" where one of them did not run."""
    if peer in row.get("times", {}):
        return cell(row["times"][peer])
    ours, theirs = (number(row["by"].get(name)) for name in (OURS, peer))
    if not ours or not theirs:
        return ""
    return f"{ours / theirs if unit in HIGHER_IS_BETTER else theirs / ours:.2f}"


def columns(section: Section) -> list[str]:
    """Who was measured: ours first, what only moves the bytes last."""
    found = dict.fromkeys(name for row in section["rows"] for name in row["by"])
    return sorted(
        found,
        key=lambda n: (n != OURS, not n.startswith(OURS), n.startswith("plain")),
    )


def beside(figures: list[Figure | None]) -> list[str]:
    """What is known of these figures but their number."""
    known = {k for f in figures if isinstance(f, dict) for k in f}
    return [k for k in SHOWN if k in known]


def heading(words: str, figures: list[Figure | None]) -> str:
    said = "; ".join(SHOWN[k][0] for k in beside(figures))
    return f"{words} ({said})" if said else words


def cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if not isinstance(figure, dict):
        return str(figure)
    said = "; ".join(SHOWN[k][1].format(figure[k]) for k in SHOWN if k in figure)
    return f"{figure['value']} ({said})" if said else str(figure["value"])


def measured(section: Section, record: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Date and versions of a section."""
    return (
        section.get("date", record.get("date", "")),
        section.get("versions", record.get("versions", {})),
    )


def dump(record: dict[str, Any]) -> str:
    """JSON with a line for each row and each line of words, so that changes show."""
    lines = ["{"]
    for key, value in record.items():
        if key != "sections":
            lines.append(f' "{key}": {listed(value, " ")},')
    lines.append(' "sections": [')
    sections = []
    for section in record.get("sections", ()):
        parts = [f'   "{k}": {listed(v, "   ")}' for k, v in section.items()]
        sections.append("  {\n" + ",\n".join(parts) + "\n  }")
    lines.append(",\n".join(sections))
    return "\n".join([*lines, " ]", "}"]) + "\n"


def listed(value: Any, indent: str) -> str:
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    lines = [f"{indent} {json.dumps(x, ensure_ascii=False)}" for x in value]
    return "[\n" + ",\n".join(lines) + f"\n{indent}]" if lines else "[]"


def write(record: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump(record))


def run_on_cpu(op: str, family: str, machine: str, section: Section) -> dict[str, Any]:
    """A run of a CPU, measured just now, with one section of an op's record."""
    import jax

    date = time.strftime("%Y-%m-%d")
    return {
        "name": op,
        "op": op,
        "family": family,
        "machine": machine,
        "date": date,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "sections": [section | {"date": date}],
    }


def write_run(run: dict[str, Any], folder: Path) -> None:
    """What a benchmark measured just now, for `pages --add`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{run['name']}.json").write_text(json.dumps(run, indent=1))
