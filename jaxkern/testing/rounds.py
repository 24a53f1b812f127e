"""Time of programs taken in turn: the protocol, and those that the host's clock times.

What is compared runs round by round, each program once a round, so that all meet the
same heat and load.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax

REPEATS = 7
LEAST_SECONDS = 0.02  # of a repeat by the host's clock: many short calls, one long one


class Program(Protocol):
    def warm(self) -> None:
        """First runs, after which the host's share is known."""

    def seconds(self) -> float:
        """Of one call, the mean over its operands."""
        ...


@dataclasses.dataclass
class HostProgram:
    """Calls of an executable on several operands in turn, by the host's clock."""

    executable: Callable
    sets: Sequence[tuple]
    calls: int = 1

    @classmethod
    def of(cls, f: Callable, sets: Sequence[tuple]) -> "HostProgram":
        return cls(jax.jit(f).lower(*sets[0]).compile(), sets)

    def warm(self) -> None:
        self.calls = len(self.sets)
        self.seconds()
        rounds = round(LEAST_SECONDS / self.seconds() / len(self.sets))
        self.calls = len(self.sets) * max(1, rounds)

    def seconds(self) -> float:
        """Of one call, from before it is queued until its result is there."""
        begin, out = time.perf_counter(), None
        for i in range(self.calls):
            out = self.executable(*self.sets[i % len(self.sets)])
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / self.calls


def times_in_turn[K](programs: Mapping[K, Program]) -> dict[K, list[float]]:
    """Seconds of a call of each in every round; all have been warmed."""
    rounds = [
        {key: program.seconds() for key, program in programs.items()}
        for _ in range(REPEATS)
    ]
    return {key: [r[key] for r in rounds] for key in programs}


def seconds_in_turn[K](programs: Mapping[K, Program]) -> dict[K, float]:
    """Median seconds of a call of each."""
    times = times_in_turn(programs)
    return {key: statistics.median(found) for key, found in times.items()}
