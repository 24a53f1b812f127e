"""Which accesses to memory may run at once: RAW, WAR and WAW over byte ranges.

Two accesses conflict where their ranges of one buffer overlap and at least one of them
writes. Reads never conflict with reads.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Region(NamedTuple):
    """The bytes `start <= k < stop` of a buffer.

    `buffer` is "v7" for value 7, "arg0" for a donated argument, "ref3" for a reference.
    """

    buffer: str
    start: int
    stop: int

    def overlaps(self, other: "Region") -> bool:
        shared = max(self.start, other.start) < min(self.stop, other.stop)
        return shared and self.buffer == other.buffer

    def __repr__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


class ConflictTracker:
    """What the current group of concurrent operations reads and writes.

    Belongs to one thread. Conflicts are named as the later operation meets them: RAW
    reads what the group writes, WAR writes what it reads, WAW writes what it writes.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins an empty group."""
        self._reads: dict[str, list[Region]] = {}
        self._writes: dict[str, list[Region]] = {}

    def record(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """Adds an operation to the group."""
        for table, regions in ((self._reads, reads), (self._writes, writes)):
            for region in regions:
                table.setdefault(region.buffer, []).append(region)

    def conflicts(
        self, reads: Iterable[Region], writes: Iterable[Region]
    ) -> frozenset[str]:
        """Why an operation cannot join the group: a subset of {"RAW", "WAR", "WAW"}."""
        writes = tuple(writes)
        checks = (
            ("RAW", self._writes, reads),
            ("WAR", self._reads, writes),
            ("WAW", self._writes, writes),
        )
        return frozenset(
            kind
            for kind, table, regions in checks
            if any(r.overlaps(q) for r in regions for q in table.get(r.buffer, ()))
        )

    def barrier_between(
        self, reads: Iterable[Region], writes: Iterable[Region]
    ) -> bool:
        """Adds an operation; True where a barrier, and so a new group, comes first."""
        reads, writes = tuple(reads), tuple(writes)
        needed = bool(self.conflicts(reads, writes))
        if needed:
            self.reset()
        self.record(reads, writes)
        return needed


def conflicts_between(
    reads: Iterable[Region],
    writes: Iterable[Region],
    later_reads: Iterable[Region],
    later_writes: Iterable[Region],
) -> frozenset[str]:
    """Why a later operation must wait for an earlier one."""
    tracker = ConflictTracker()
    tracker.record(reads, writes)
    return tracker.conflicts(later_reads, later_writes)
