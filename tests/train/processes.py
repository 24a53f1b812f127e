"""Processes on this machine that have eight devices in all."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def started(count: int, arguments: list) -> subprocess.Popen:
    """This Python, given `arguments`, as one of `count` processes."""
    flags = "--xla_backend_optimization_level=0"
    flags += f" --xla_force_host_platform_device_count={8 // count}"
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def said_by_all(processes: list[subprocess.Popen]) -> list[tuple[str, str]]:
    """(output, errors) of each, once all have ended well."""
    try:
        said = [p.communicate(timeout=300) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, (_, errors) in zip(processes, said, strict=True):
        assert p.returncode == 0, errors[-3000:]
    return said
