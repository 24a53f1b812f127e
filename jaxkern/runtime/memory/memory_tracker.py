"""`MemoryTracker`: a counter of bytes with a limit."""

import threading

from jaxkern.runtime.memory.memory_limit import MemoryLimitExceeded
from jaxkern.runtime.trace import fault_points


class MemoryTracker:
    """Counts bytes that the caller reserves and frees; safe under threads.

    It counts what it is told. `allocated_bytes` says what a device holds,
    `memory_limit` what a program would add.

    Args:
      limit: bytes, or None for no limit.

    Raises:
      ValueError: `limit` is negative.

    Example:
      >>> from jaxkern import runtime
      >>> tracker = runtime.MemoryTracker(limit=1000)
      >>> tracker.reserve(600)
      >>> tracker.free(200)
      >>> tracker.allocated, tracker.peak
      (400, 600)
    """

    def __init__(self, limit: int | None = None):
        if limit is not None and limit < 0:
            raise ValueError(f"MemoryTracker: `limit` must be >= 0, got {limit}.")
        self._limit, self._allocated, self._peak = limit, 0, 0
        self._lock = threading.Lock()

    @property
    def limit(self) -> int | None:
        """Bytes, or None."""
        return self._limit

    @property
    def allocated(self) -> int:
        """Bytes reserved and not freed."""
        return self._allocated

    @property
    def peak(self) -> int:
        """The most bytes that were reserved at one time."""
        return self._peak

    def reserve(self, num_bytes: int) -> None:
        """Adds to the counter.

        Raises:
          MemoryLimitExceeded: the sum would exceed the limit; nothing was added.
          ValueError: `num_bytes` is negative.
        """
        if num_bytes < 0:
            raise ValueError(f"reserve: `num_bytes` must be >= 0, got {num_bytes}.")
        fault_points.hit("alloc")
        with self._lock:
            total = self._allocated + num_bytes
            if self._limit is not None and total > self._limit:
                raise MemoryLimitExceeded(
                    num_bytes, self._allocated, self._limit, name="MemoryTracker"
                )
            self._allocated, self._peak = total, max(self._peak, total)

    def free(self, num_bytes: int) -> None:
        """Subtracts from the counter.

        Raises:
          ValueError: more than is reserved, or negative.
        """
        with self._lock:
            if not 0 <= num_bytes <= self._allocated:
                raise ValueError(
                    f"free: `num_bytes` must be from 0 to the {self._allocated} "
                    f"reserved, got {num_bytes}."
                )
            self._allocated -= num_bytes
