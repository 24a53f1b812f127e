"""Points of the host code at which a test can make a call fail.

`hit("execute")` does nothing until `testing.inject_faults` arms a plan: one look at an
empty tuple. Nothing is traced.
"""

import dataclasses
import threading

POINTS = ("alloc", "compile", "execute", "upload")  # and the name of every op


@dataclasses.dataclass
class FaultPlan:
    """When a point fails.

    Attributes:
      point: which one.
      after: hits that pass first.
      times: failures after that; None for all.
      error: what is raised.
      hits: how often the point was reached.
      raised: how often it failed.
    """

    point: str
    after: int
    times: int | None
    error: BaseException
    hits: int = 0
    raised: int = 0

    def fails_now(self) -> bool:
        self.hits += 1
        due = self.hits > self.after
        fails = due and (self.times is None or self.raised < self.times)
        self.raised += fails
        return fails


armed: tuple[FaultPlan, ...] = ()  # replaced, never changed in place
lock = threading.Lock()


def hit(point: str) -> None:
    """Raises where an armed plan says so."""
    for plan in armed:
        if plan.point == point:
            with lock:
                fails = plan.fails_now()
            if fails:
                raise plan.error


def arm(plan: FaultPlan) -> None:
    global armed
    with lock:
        armed = (*armed, plan)


def disarm(plan: FaultPlan) -> None:
    global armed
    with lock:
        armed = tuple(p for p in armed if p is not plan)
