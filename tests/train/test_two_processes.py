"""Processes of four devices each, joined by `jax.distributed`, train as one of eight.

The tests of meshes have one process, which holds every shard: what a process cannot
read of an array of all, such as a counter that lies on one device, they cannot see.
"""

import numpy as np
import pytest

from tests.train.processes import free_port, said_by_all, started

COUNT, STEPS, SAVED = 2, 6, 3


def start(count, folder="-", killed="-"):
    """That many processes with eight devices in all."""
    command = ["-m", "tests.train.one_of_several"]
    command += [str(free_port() if count > 1 else 0), str(count)]
    return [
        started(count, [*command, str(i), str(folder), str(killed)])
        for i in range(count)
    ]


def said_by(processes):
    """A digest of the state after SAVED steps, and the losses in bits."""
    found = [out.split("losses")[-1].split() for out, _ in said_by_all(processes)]
    assert all(words == found[0] for words in found), "the processes disagree"
    return found[0][0], found[0][1:]


def numbers(losses):
    return np.array([float.fromhex(loss) for loss in losses])


def test_two_processes_are_one():
    both, alone = start(COUNT), start(1)
    (_, found), (_, expected) = said_by(both), said_by(alone)
    assert len(found) == len(expected) == STEPS
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-6)


@pytest.mark.full
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """From the checkpoint of two processes, on two and then on one.

    One process sums over devices in another order, so of it the state is compared.
    """
    pytest.importorskip("orbax.checkpoint")
    state, expected = said_by(start(COUNT))
    killed = start(COUNT, tmp_path / "run", killed=1)
    try:
        assert killed[1].wait(timeout=300) == -9
    finally:
        for p in killed:  # the other waits for it
            p.kill()
            p.communicate()
    assert said_by(start(COUNT, tmp_path / "run")) == (state, expected[SAVED:])
    same, losses = said_by(start(1, tmp_path / "run"))
    assert same == state, "the restored state differs"
    np.testing.assert_allclose(numbers(losses), numbers(expected[SAVED:]), rtol=1e-6)
