"""What a run says of itself: lines of JSON, a curve, and a bar on a terminal."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LINES, CURVE = "steps.jsonl", "loss.png"
REFRESH = 0.5  # seconds


class Journal:
    """`steps.jsonl` and `loss.png` of a run; a line for each step.

    Args:
      folder: of the run.
      after: steps that stay of an earlier part of the run; later lines go.
      writes: False on all processes but one.
    """

    def __init__(self, folder: str | os.PathLike[str], after: int, *, writes: bool):
        self.path, self.writes = Path(folder) / LINES, writes
        if not writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(self.path) if line["step"] <= after]
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        part.replace(self.path)

    def add(self, *lines: Mapping[str, Any]) -> None:
        if self.writes:
            with open(self.path, "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    def draw(self) -> None:
        """The curve, where matplotlib is installed."""
        if not self.writes:
            return
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            return
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        lines = [*read_lines(self.path)]
        for key, label in (("loss", "training"), ("evaluation", "evaluation")):
            points = [(line["step"], line[key]) for line in lines if key in line]
            points = [(x, y) for x, y in points if y is not None]
            if points:
                marker = "o" if key == "evaluation" or len(points) == 1 else None
                axes.plot(*zip(*points, strict=True), label=label, marker=marker)
        axes.set(xlabel="step", ylabel="loss [nats per token]")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.path.with_name(CURVE), dpi=120)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; a last one that a killed run cut is none."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            return
        yield found


class Screen:
    """On a terminal a bar; elsewhere a line after every few steps; both on stderr.

    Args:
      steps: of the whole run.
      done: of them, before.
      every: steps between two lines.
      quiet: nothing at all.
    """

    def __init__(self, steps: int, done: int, every: int, *, quiet: bool):
        self.every, self.quiet, self.progress = every, quiet, None
        self.steps, self.shown = steps, 0.0
        if quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.task = self.progress.add_task("", total=steps, completed=done, said="")
        self.progress.start()

    def is_behind(self) -> bool:
        """Whether the bar has stood still for a while."""
        return self.progress is not None and time.monotonic() > self.shown + REFRESH

    def step(self, i: int, said: str) -> None:
        """After step i."""
        self.shown = time.monotonic()
        if self.progress is not None:
            self.progress.update(self.task, completed=i, said=said)
        elif not self.quiet and (i % self.every == 0 or i == self.steps):
            print(f"step {i} of {self.steps}: {said}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
