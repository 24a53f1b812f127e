"""Rows of a record from benchmarks that print lines of their own.

    rows = Rows("linear", "one activation, bfloat16", "us", options.out)
    rows.add("28672x8192", "1 row", {"jaxkern": figure(104e-6, num_bytes=4.7e8)})

Each row is written as soon as it is there, for `pages --add`.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._find import owner
from benchmarks._records import Figure, Row, write_run
from benchmarks._report import machine, versions
from benchmarks._time import copy_rate


def figure(seconds: float, num_bytes: float, flops: float = 0.0) -> Figure:
    """Microseconds, the share of the copy rate, and TFLOP/s where they are counted."""
    found: dict[str, Any] = {"value": round(1e6 * seconds, 2)}
    found["share"] = round(100 * num_bytes / copy_rate() / seconds, 1)
    if flops:
        found["tflops"] = round(flops / seconds * 1e-12)
    return found


@dataclasses.dataclass
class Rows:
    """What one benchmark measured so far.

    Attributes:
      name: of the benchmark.
      title: of the section.
      unit: of its figures.
      out: folder for the record, None for none.
      command: as it was called, with its options.
      record_of: (family, op) of the record, where not the benchmark's own.
    """

    name: str
    title: str
    unit: str
    out: Path | None
    command: str = ""
    record_of: tuple[str, str] | None = None
    found: list[Row] = dataclasses.field(default_factory=list)

    def add(self, case: str, which: str, by: Mapping[str, Figure], **beside: Figure):
        row: Row = {"case": case, "pass": which, "by": dict(by)}
        self.found.append(row | ({"beside": beside} if beside else {}))
        if self.out:
            write_run(self.record(), self.out)

    def record(self) -> dict[str, Any]:
        family, op = self.record_of or owner(self.name)
        date = time.strftime("%Y-%m-%d")
        section = {
            "title": self.title,
            "run": self.name,
            "date": date,
            "unit": self.unit,
            "command": self.command or f"python -m benchmarks {self.name} --out DIR",
            "rows": self.found,
        }
        return {
            "name": self.name,
            "op": op,
            "family": family,
            "machine": machine(),
            "date": date,
            "versions": versions(),
            "sections": [section],
        }
