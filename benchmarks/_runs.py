"""Brings what a run left under `--out DIR` into the records.

A run names its benchmark, family and date, and has either `results` in seconds, as
`_report.py` writes them, or `sections` in the form of the records.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._records import OURS, RECORDS, Row, Section, write
from benchmarks._report import BYTES_ONLY, PASSES, Record, share_of_limit

MICROSECONDS = "us"
TEMPORARIES = "temporaries"


def add(runs: Path, folder: Path = RECORDS) -> Iterator[str]:
    """Adds every run in `runs`; says what each one did."""
    for file in sorted(runs.glob("*.json")):
        run = json.loads(file.read_text())
        missing = [k for k in ("op", "family", "machine", "date") if not run.get(k)]
        if missing:
            raise ValueError(
                f"{file}: the run does not say its {', '.join(missing)}: measure it "
                "again with `python -m benchmarks NAME --out DIR`."
            )
        to = folder / run["machine"] / f"{run['op']}.json"
        record = json.loads(to.read_text()) if to.exists() else new_record(run)
        for section in run.get("sections") or [section_of(run)]:
            merge(record, section, run)
            count = len(section["rows"])
            yield f"{file.name}: {count} rows into {to}; see that its text still holds."
        write(record, to)


def new_record(run: dict[str, Any]) -> dict[str, Any]:
    return {k: run[k] for k in ("op", "family", "versions")} | {"sections": []}


def merge(record: dict[str, Any], new: Section, run: dict[str, Any]) -> None:
    """Rows of the same case and pass are replaced, others stay with their date."""
    for section in record["sections"]:
        same_unit = section.get("unit") == new.get("unit")
        if section.get("run") == new["run"] and same_unit:
            break
    else:
        record["sections"].append(new | {"versions": run["versions"]})
        return
    if "versions" not in section:
        section["versions"] = record["versions"]
    keys = {key_of(row): row for row in new["rows"]}
    old = set(map(key_of, section["rows"]))
    rows = []
    for row in section["rows"]:
        stays = {"date": section["date"], "versions": section["versions"]} | row
        rows.append(keys.get(key_of(row), stays))
    section["rows"] = rows + [row for key, row in keys.items() if key not in old]
    section["date"], section["versions"] = new["date"], run["versions"]
    section["command"] = new["command"]


def key_of(row: Row) -> tuple[str, str, str]:
    """What a row is of; those of the goals say of which benchmark, too."""
    return row.get("run", ""), row["case"], row["pass"]


def section_of(run: Record) -> Section:
    """A run's seconds as rows of microseconds, with shares of its limit."""
    rows = []
    for case, by in run["results"].items():
        for which in (*PASSES, "both", "sum"):
            found = {
                f"plain, {name}" if name == BYTES_ONLY else name: figure
                for name, row in by.items()
                if (figure := figure_of(run, case, which, row)) is not None
            }
            if OURS in found:  # a peer that failed has no pass of its own
                row: Row = {"case": case, "pass": which, "by": found}
                if which == "both" and (taken := by[OURS].get(TEMPORARIES)):
                    row["beside"] = {f"{TEMPORARIES}, MB": taken}
                rows.append(row)
    return {
        "title": run["name"],
        "run": run["name"],
        "date": run["date"],
        "unit": MICROSECONDS,
        "command": run["command"],
        "rows": rows,
    }


def figure_of(run: Record, case: str, which: str, row: dict[str, Any]) -> Any:
    """None where the run has no such pass."""
    if "failed" in row:
        return row["failed"][:60]
    if which == "sum" and "both" not in row and all(p in row for p in PASSES):
        return round(1e6 * sum(row[p] for p in PASSES), 1)
    if which not in row:
        return None
    value = round(row[which] * 1e6, 1)
    if which not in PASSES:
        return value
    share = 100 * share_of_limit(run, case, which, row[which])
    return {"value": value, "share": round(share, 1)}
