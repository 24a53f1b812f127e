"""What an answer took: times, memory, implementations."""

import resource
import sys
from typing import Any

from jaxkern.models.command_line.screen import show


def rate(tokens: float, seconds: float) -> float | None:
    return tokens / seconds if seconds else None


def speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tokens/s"


def peak_memory() -> int:
    """Most bytes that this process ever held in memory, mapped files included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def drafted_row(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Tokens of an answer by each call of the model, where it reads drafts."""
    tokens = f"{report['timings']['tokens_a_step']:.2f}"
    return [(f"tokens a step, {report['draft']} drafts", tokens)] * (
        report["draft"] > 0
    )


def print_tables(report: dict[str, Any]) -> None:
    """The report of `generate` on stderr; no name is cut, but wide ones wrap there."""
    from rich.table import Table
    from rich.text import Text

    timings = report["timings"]
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    read = sum(answer["prompt_tokens"] for answer in report["answers"])
    written = sum(len(answer["token_ids"]) for answer in report["answers"])
    for name, value in (
        ("load", f"{timings['load_seconds']:.2f} s"),
        ("weights", f"{report['weights']}: {report['weights_reason']}"),
        ("cache", f"{report['cache']}, {report['memory']['cache_bytes'] / 1e6:.1f} MB"),
        ("compile", f"{timings['compile_seconds']:.2f} s"),
        (f"prefill of {read} tokens", speed(timings["prefill_tokens_per_second"])),
        (f"decode of {written} tokens", speed(timings["decode_tokens_per_second"])),
        *drafted_row(report),
        ("executables", ", ".join(report["executables"])),
        ("peak memory", f"{report['memory']['peak_bytes'] / 1e6:.0f} MB"),
    ):
        table.add_row(name, Text(value))
    table.add_section()
    by_op: dict[str, dict[str, None]] = {}
    for ops in report["implementations"].values():
        for op, runs in ops.items():
            by_op.setdefault(op, {})[runs] = None
    for op, runs in by_op.items():
        table.add_row(op, Text("\n".join(runs)))
    show(table, beside=True)
