"""`Plan`: a compiled function that one can read, measure and save.

XLA's executable already is the flat, resolved list of work that other systems build by
hand. A `Plan` is that executable with the list in view: instructions, memory map,
launches, times.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkern.runtime.plan.profile import (
    Limits,
    Profile,
    dispatch_seconds,
    profile_executable,
)
from jaxkern.runtime.plan.record import PlanRecord
from jaxkern.runtime.plan.report import Report, report_of
from jaxkern.runtime.plan.saved_plan import save_plan


class Plan(PlanRecord):
    """A compiled function, called as the function is; see `compile`.

    A call goes straight to `jax.stages.Compiled` and returns before the device is done,
    as every call of JAX; `jax.block_until_ready` waits. What can be read of it is in
    `PlanRecord`.
    """

    def __call__(self, *args, **kwargs):
        return self.compiled(*args, **kwargs)

    def report(self) -> Report:
        """What XLA made of the function: equations before, instructions after."""
        return report_of(self)

    def dispatch_overhead(self, *args: Any, calls: int = 200) -> float:
        """Seconds that one call costs the host beside the work, measured.

        The time of an executable with the same arguments that computes nothing.

        Args:
          args: of the function; zeros if there are none.
          calls: number of calls; the median of their times counts.
        """
        return dispatch_seconds(self, args, calls)

    def profile(
        self, *args: Any, calls: int = 5, limits: Limits | None = None
    ) -> Profile:
        """Runs the function under JAX's profiler: time, bytes and share per kernel.

        A trace shows a CUDA graph as one event, so on a GPU the kernels are timed in
        `uncaptured`, which the first call compiles; `seconds` is of the plan itself.

        Args:
          args: of the function. Donated ones are copied for each call.
          calls: number of calls; their mean counts.
          limits: of the device; measured at the first profile if None.

        Returns:
          A `Profile`; its `note` says in words where the trace shows no kernels.
        """
        return profile_executable(self, args, calls, limits)

    def save(self, path: str | Path, *, platforms: Sequence[str] | None = None) -> None:
        """Writes the function to a file; `jaxkern.runtime.load` reads it.

        The file holds the StableHLO of `jax.export`, which other devices and later
        versions of jax can compile, and the machine code for this very device.

        Args:
          path: of the file, replaced in one step if it exists.
          platforms: that the StableHLO is for, such as `("cpu", "cuda")`; this
            machine's if None.

        Raises:
          ValueError: the function cannot be exported; the message says why.
        """
        save_plan(self, path, platforms)
