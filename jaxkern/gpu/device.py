"""The GPU that is compiled for, and how many programs it takes.

A kernel's file has the rule for its sizes, by shape and dtype, from what was measured
on an H200. Nothing is measured when an op is called.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax

WARP = 32
OLDEST = 80  # the compute capability that every kernel must compile for
NUM_SMS = 132  # multiprocessors where the device is not known: an H100's


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def cuda_device() -> Any:
    """This machine's first CUDA GPU, or None."""
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


def num_sms() -> int:
    return getattr(cuda_device(), "core_count", NUM_SMS)


@functools.cache
def driver_version() -> int:
    """12010 for a driver of CUDA 12.1; 0 on a machine without a driver."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return 0
    return getattr(cuda_versions, "cuda_driver_get_version", int)()


def max_parameter_bytes() -> int:
    """What all parameters of a kernel may take: more than 4 KiB since CUDA 12.1.

    Where no driver is, what is compiled is for a machine with a newer one.
    """
    return 4096 if 0 < driver_version() < 12_010 else 32_764


def num_programs(num_blocks: int, waves: int) -> int:
    """Programs of a grid in which each walks over many blocks; 0 waves: one each."""
    return min(num_blocks, num_sms() * waves) if waves else num_blocks


@functools.cache
def device_capability() -> int | None:
    """90 for an H200; None without a CUDA GPU."""
    device = cuda_device()
    return None if device is None else int(device.compute_capability.replace(".", ""))


assumed_capability: list[int] = []


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Sizes and compiles kernels for another GPU than this machine's."""
    assumed_capability.append(capability)
    try:
        yield
    finally:
        assumed_capability.pop()


def compute_capability() -> int:
    """90 for an H200: of this machine's GPU, or the oldest that is supported."""
    if assumed_capability:
        return assumed_capability[-1]
    return device_capability() or OLDEST
