"""Processes of four devices each, joined by `jax.distributed`, train as one of eight.

The tests of meshes have one process, which holds every shard: what a process cannot
read of an array of all, such as a counter that lies on one device, they cannot see.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
COUNT, STEPS, SAVED = 2, 6, 3


def start(count, folder="-", killed="-"):
    """That many processes with eight devices in all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if count > 1 else 0
    flags = "--xla_backend_optimization_level=0"
    flags += f" --xla_force_host_platform_device_count={8 // count}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.train.one_of_several", str(port)]
    return [
        subprocess.Popen(
            [*command, str(count), str(i), str(folder), str(killed)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(count)
    ]


def said_by(processes):
    """A digest of the state after SAVED steps, and the losses in bits."""
    try:
        said = [p.communicate(timeout=300) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, (_, errors) in zip(processes, said, strict=True):
        assert p.returncode == 0, errors[-2000:]
    found = [out.split("losses")[-1].split() for out, _ in said]
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
