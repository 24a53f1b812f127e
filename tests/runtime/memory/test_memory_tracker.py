"""MemoryTracker: exact under threads; a refused reservation changes nothing."""

import threading

import pytest

from jaxkern.runtime import MemoryLimitExceeded, MemoryTracker
from jaxkern.runtime.testing.testing import inject_faults


def test_a_refused_reservation_leaves_the_counter():
    tracker = MemoryTracker(100)
    tracker.reserve(60)
    with pytest.raises(MemoryLimitExceeded) as e:
        tracker.reserve(41)
    assert (e.value.requested, e.value.allocated, e.value.limit) == (41, 60, 100)
    assert (tracker.allocated, tracker.peak, tracker.limit) == (60, 60, 100)
    tracker.reserve(40)
    tracker.free(90)
    assert (tracker.allocated, tracker.peak) == (10, 100)
    with inject_faults("alloc") as plan, pytest.raises(RuntimeError, match="injected"):
        tracker.reserve(1)
    assert (tracker.allocated, plan.raised) == (10, 1)


def test_wrong_numbers_are_refused():
    tracker = MemoryTracker()
    tracker.reserve(10**15)
    for call in (lambda: tracker.free(10**15 + 1), lambda: tracker.free(-1)):
        with pytest.raises(ValueError, match="free: "):
            call()
    with pytest.raises(ValueError, match="reserve: "):
        tracker.reserve(-1)
    with pytest.raises(ValueError, match="limit"):
        MemoryTracker(-1)
    assert tracker.allocated == 10**15


def test_threads_never_exceed_the_limit():
    tracker, granted = MemoryTracker(1000), []

    def work():
        held = 0
        for _ in range(2000):
            try:
                tracker.reserve(7)
                held += 7
            except MemoryLimitExceeded:
                tracker.free(held)
                held = 0
        granted.append(held)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert tracker.allocated == sum(granted) <= 1000
    assert 0 < tracker.peak <= 1000
