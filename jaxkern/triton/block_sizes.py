"""Block sizes of the Triton kernels: measured tables, else a rule of thumb.

A table is `lowering/tuned/<device>.json`, written by `python -m benchmarks tune OP`.
Nothing is measured when an op is called.
"""

import functools
import json
from importlib import resources
from typing import Any

import jax

WARP = 32
NUM_SMS = 132  # multiprocessors where the device is not known: an H100's


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def device_kind() -> str:
    """Name of the CUDA device, such as "NVIDIA H200"; empty without one."""
    try:
        return jax.devices("cuda")[0].device_kind
    except RuntimeError:
        return ""


@functools.cache
def num_sms() -> int:
    try:
        return jax.devices("cuda")[0].core_count
    except RuntimeError:
        return NUM_SMS


@functools.cache
def table(device: str) -> dict[str, dict[str, dict[str, int]]]:
    """{kernel: {key: sizes}} for a device, empty where none was measured."""
    name = device.lower().replace("nvidia ", "").replace(" ", "_")
    file = resources.files("jaxkern.lowering") / "tuned" / f"{name}.json"
    return json.loads(file.read_text()) if name and file.is_file() else {}


override: dict[str, dict[str, int]] = {}  # sizes being tried by the tuner, by kernel


def block_sizes(kernel: str, rows: int, d: int, dtype: Any) -> dict[str, int]:
    """The sizes of a row-wise kernel for rows of `d` elements of `dtype`."""
    block = next_power_of_2(d)
    sizes = rule_of_thumb(kernel, rows, block, jax.numpy.dtype(dtype).itemsize)
    measured = table(device_kind()).get(kernel, {})
    sizes |= measured.get(f"{block} {jax.numpy.dtype(dtype).name}", {})
    return sizes | override.get(kernel, {})


def rule_of_thumb(kernel: str, rows: int, block: int, itemsize: int) -> dict[str, int]:
    """About 16 elements a thread, whole rows, the next row loading where it fits."""
    if kernel.startswith("long_"):
        return {"BLOCK": 8192, "num_warps": 16}
    rows_together = max(1, min(2048 // block, next_power_of_2(rows)))
    warps = min(max(rows_together * block // (16 * WARP), 1), 16)
    return {
        "BLOCK": block,
        "ROWS": rows_together,
        "WAVES": 4,
        "STAGES": 2 if block * itemsize <= 2**15 else 1,
        "num_warps": next_power_of_2(warps),
    }


def num_programs(num_blocks: int, waves: int) -> int:
    """Programs of a grid in which each walks over many blocks; 0 waves: one each."""
    return min(num_blocks, num_sms() * waves) if waves else num_blocks
