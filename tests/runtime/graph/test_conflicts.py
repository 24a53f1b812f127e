"""RAW, WAR and WAW over byte ranges."""

import pytest

from jaxkern.runtime import ConflictTracker, Region

A, B = Region("arg0", 0, 16), Region("arg0", 16, 32)
ACROSS = Region("arg0", 15, 17)


@pytest.mark.parametrize(
    ("reads", "writes", "kinds"),
    [
        ([A], [], set()),  # reads never conflict with reads
        ([B], [], {"RAW"}),
        ([], [A], {"WAR"}),
        ([], [B], {"WAW"}),
        ([ACROSS], [], {"RAW"}),
        ([], [ACROSS], {"WAR", "WAW"}),
        ([Region("arg1", 0, 99)], [Region("arg1", 0, 99)], set()),
        ([Region("arg0", 32, 40)], [Region("arg0", 32, 40)], set()),
        ([Region("arg0", 20, 20)], [], set()),  # no bytes
    ],
)
def test_kinds_of_conflict(reads, writes, kinds):
    tracker = ConflictTracker()
    tracker.record([A], [B])
    assert tracker.conflicts(reads, writes) == kinds


def test_a_barrier_begins_a_group_with_the_operation_that_needed_it():
    tracker = ConflictTracker()
    assert not tracker.barrier_between([], [A])
    assert not tracker.barrier_between([], [B])
    assert tracker.barrier_between([A], [])  # RAW
    assert not tracker.barrier_between([B], [])  # the write of B is behind the barrier
    assert tracker.barrier_between([], [A])  # WAR
    tracker.reset()
    assert not tracker.barrier_between([A], [A])
