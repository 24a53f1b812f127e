"""What a benchmark measured: a record, its table, its plot."""

import contextlib
import importlib.metadata
import importlib.util
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._find import owner

CONSOLE = Console(width=150)
PASSES = ("forward", "backward")
BYTES_ONLY = "only its bytes"

Record = dict[str, Any]


def share_of_limit(record: Record, case: str, which: str, seconds: float) -> float:
    """The least time that memory or arithmetic allow over the time it took."""
    limits, shape, k = record["limits"], record["cases"][case], PASSES.index(which)
    floor = max(
        shape["bytes"][k] / limits["copy"],
        shape.get("flops", (0, 0))[k] / limits.get("matmul", float("inf")),
    )
    return floor / seconds


def table(record: Record) -> Table:
    columns, lines = cells(record)
    found = Table(title=f"{record['name']}: device time of one call")
    for column in columns:
        found.add_column(column, justify="right" if column.endswith("us") else "left")
    for line in lines:
        found.add_row(*line)
    return found


def markdown(record: Record) -> str:
    columns, lines = cells(record)
    lines = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells(record: Record) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: microseconds, shares of the limit in brackets, errors."""
    results = record["results"]
    rows = [row for by in results.values() for row in by.values()]
    passes = [which for which in PASSES if any(which in row for row in rows)]
    both = ["both us"] if len(passes) == 2 else []
    columns = ["case", "by", *(f"{which} us" for which in passes), *both, "errors"]
    lines = []
    for case, by in results.items():
        for name, row in by.items():
            line = [case, name]
            if "failed" in row:
                line += [row["failed"][:60], *[""] * (len(columns) - 3)]
            else:
                line += [timed(record, case, which, row[which]) for which in passes]
                line += [of_both(row)] if both else []
                errors = (row.get("error"), row.get("gradient error"))
                line.append(", ".join(f"{e:.1e}" for e in errors if e is not None))
            lines.append(line)
    return columns, lines


def timed(record: Record, case: str, which: str, seconds: float) -> str:
    share = 100 * share_of_limit(record, case, which, seconds)
    return f"{seconds * 1e6:.1f} ({share:.0f} %)"


def of_both(row: dict[str, Any]) -> str:
    """Microseconds of both passes: in one executable if measured so, else the sum."""
    return f"{row.get('both', row['forward'] + row['backward']) * 1e6:.1f}"


def limits_line(record: Record) -> str:
    limits = record["limits"]
    matmul = (
        f", matmul {limits['matmul'] / 1e12:.0f} TFLOP/s" if "matmul" in limits else ""
    )
    return (
        f"limits: copy {limits['copy'] / 1e12:.2f} TB/s{matmul}; {record['versions']}"
    )


def begun(name: str, limits: dict[str, float]) -> Record:
    """The record of a run whose cases are still to be measured."""
    family, op = owner(name)
    return {
        "name": name,
        "op": op,
        "family": family,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks {op} --peers --out DIR",
        "limits": limits,
        "versions": versions(),
        "cases": {},
        "results": {},
    }


def machine() -> str:
    """Of the first device, as the folder of its records is called: h200."""
    kind = jax.devices()[0].device_kind.lower()
    return kind.removeprefix("nvidia ").replace(" ", "_")


def versions() -> dict[str, str]:
    found = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    for name in ("torch", "triton", "liger-kernel", "tokamax", "optax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def plot(record: Record, file: Path) -> None:
    """Shares of the limit, pass by pass; nothing without matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = record["results"]
    by = list(dict.fromkeys(n for rows in results.values() for n in rows))
    passes = [
        which
        for which in PASSES
        if any(which in row for rows in results.values() for row in rows.values())
    ]
    figure, axes = plt.subplots(1, len(passes), figsize=(6 * len(passes), 4))
    for which, ax in zip(passes, np.atleast_1d(axes), strict=True):
        for k, implementation in enumerate(by):
            shares = [
                100 * share_of_limit(record, case, which, seconds)
                if (seconds := rows.get(implementation, {}).get(which))
                else 0.0
                for case, rows in results.items()
            ]
            ax.bar(np.arange(len(shares)) + k * 0.8 / len(by), shares, 0.8 / len(by))
        ax.set_xticks(np.arange(len(results)), list(results), rotation=20)
        ax.set_ylabel("% of the measured limit")
        ax.set_title(f"{record['name']} {which}")
        ax.legend(by)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
