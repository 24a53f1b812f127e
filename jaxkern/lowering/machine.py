"""The machine and the versions that compiled code and measured times belong to."""

import functools
import hashlib
import importlib.metadata
import os
import platform as host
import re
from pathlib import Path

import jax


def versions() -> dict[str, str]:
    def version(distribution: str) -> str:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "jaxkern": version("jaxkern-ops"),
    }


def machine(device: jax.Device) -> dict[str, str]:
    """What machine code depends on."""
    found = {"platform": device.platform, "device kind": device.device_kind}
    found["architecture"] = host.machine()
    if device.platform == "cpu":
        found["processor"] = processor()
    return found


def processor() -> str:
    """A fingerprint of the instruction sets, where the system lists them."""
    flags = cpu_field("flags|Features") or host.processor()
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]


@functools.cache
def cpu_field(names: str) -> str | None:
    """What the system says of its first CPU under one of these names, or None."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    match = re.search(rf"^(?:{names})\s*:(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def device_name(device: jax.Device) -> str:
    """What times depend on: "NVIDIA H200", of a CPU its threads and instructions."""
    if device.platform != "cpu":
        return device.device_kind
    model = cpu_field("model name") or host.processor() or host.machine()
    return f"{model}, {num_threads()} threads, instructions {processor()}"


def num_threads() -> int:
    """Of the host, as many as this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
