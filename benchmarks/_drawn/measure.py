"""What a draw shows: whether it is right, what runs, and the time of each side."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks._drawn.check import cotangents, wrong_results
from benchmarks._drawn.draw import Draw, Source
from benchmarks._gpu import Case, jax_programs, num_sets, under_backend
from benchmarks._time import Program, device_alone, seconds_in_turn
from benchmarks._truth import gradients, run_alone
from jaxkern import explain

DIFFERENTIATED = 0.35  # share of the draws of which gradients are taken
PROGRAM = 2000  # lines of StableHLO in one executable: more compile for long
OURS, XLA = "jaxkern", "XLA"
LEVEL, LEAST_SECONDS = 1.05, 1e-6  # a loss is beyond both


@dataclasses.dataclass
class Pass:
    """One pass: what runs in it, why not kernels, and seconds by who ran."""

    runs: list[str]
    refused: list[str]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def by_xla(self) -> bool:
        """ "auto" leaves it to XLA, with its reasons: then there is nothing to lose."""
        return all(name.startswith("xla:") for name in self.runs)

    @property
    def best_peer(self) -> str | None:
        peers = [name for name in self.seconds if name != OURS]
        return min(peers, key=self.seconds.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """Ours over the best peer's; None where one of them was not measured."""
        if OURS not in self.seconds or self.best_peer is None:
            return None
        return self.seconds[OURS] / self.seconds[self.best_peer]

    @property
    def is_loss(self) -> bool:
        if self.by_xla or self.ratio is None or self.best_peer is None:
            return False
        late = self.seconds[OURS] - self.seconds[self.best_peer]
        return self.ratio > LEVEL and late > LEAST_SECONDS


@dataclasses.dataclass
class Outcome:
    """Of one draw; `wrong` and `failed` are in words, "" where all is well."""

    op: str
    seed: int
    index: int
    title: str
    wrong: str = ""
    failed: str = ""
    took: float = 0.0
    passes: dict[str, Pass] = dataclasses.field(default_factory=dict)
    peers_failed: dict[str, str] = dataclasses.field(default_factory=dict)


def outcome_of(
    op: str,
    generate: Callable[[Source], Draw],
    seed: int,
    index: int,
    elements: int,
    timed: bool,
) -> Outcome:
    """Draws, checks and, where asked, measures."""
    source = Source(np.random.default_rng([seed, index]), elements)
    draw, begin = generate(source), time.perf_counter()
    floats = draw.floats if source.chance(DIFFERENTIATED) else ()
    title = draw.title + (", gradients" if floats else "")
    found = Outcome(op, seed, index, title)
    try:
        args = run_alone(draw.arrays, jax.random.key(index))
        found.passes = passes_of(draw.f, args, floats)
        found.wrong = wrong_results(draw, args, floats)
        if timed:
            measure(draw, args, floats, found)
    except Exception as error:  # what fails is named, and the others go on
        found.failed = in_short(error)
    found.took = time.perf_counter() - begin
    return found


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def passes_of(f: Callable, args: tuple, floats: Sequence[int]) -> dict[str, Pass]:
    """What runs in each pass, and why no kernel does."""
    found = {"forward": explain(f, *args).rows}
    if floats:
        slopes = functools.partial(gradients, f, floats)
        rows = explain(slopes, cotangents(f, args), *args).rows
        found["backward"] = tuple(row for row in rows if row.op.endswith("_bwd"))
    return {
        name: Pass([r.runs for r in rows], [why for r in rows for why in r.refused])
        for name, rows in found.items()
    }


def measure(draw: Draw, args: tuple, floats: Sequence[int], found: Outcome) -> None:
    """Adds the seconds of each pass that a kernel runs in, all sides in turn."""
    if all(p.by_xla for p in found.passes.values()):
        return
    if floats and found.passes["backward"].by_xla:
        floats = ()
    sets = operands_of(draw, args, found.index)
    programs: dict[tuple[str, str], Program] = {}
    by = {OURS: draw.f, **draw.peers}
    if draw.reference:
        by[XLA] = under_backend("xla", draw.f)
    for name, f in by.items():
        try:
            its = jax_programs(f, sets, floats)
        except Exception as error:
            if name == OURS:
                raise
            found.peers_failed[name] = in_short(error)
        else:
            programs |= {(name, which): program for which, program in its.items()}
    with device_alone():
        for (name, which), seconds in seconds_in_turn(programs).items():
            found.passes[which].seconds[name] = seconds


def operands_of(draw: Draw, args: tuple, index: int) -> list[tuple]:
    """Those that were checked, and as many more as one executable is to call with."""
    lowered = jax.jit(under_backend("xla", draw.f)).lower(*args)
    results = jax.tree.leaves((args, lowered.out_info))
    moved = sum(x.size * x.dtype.itemsize for x in results)
    most = max(2, PROGRAM // lowered.as_text().count("\n"))
    count = min(most, num_sets(Case(draw.title, draw.arrays, (moved, moved))))
    keys = jax.random.split(jax.random.key(index), count - 1)
    with device_alone():
        others = [jax.jit(draw.arrays)(key) for key in keys]
        return jax.block_until_ready([args, *others])


def from_json(kept: dict[str, Any]) -> Outcome:
    """Of what `dataclasses.asdict` made of one."""
    passes = {name: Pass(**p) for name, p in kept["passes"].items()}
    return Outcome(**{**kept, "passes": passes})
