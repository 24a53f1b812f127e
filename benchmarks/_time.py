"""Device time of torch programs beside those of jaxkern/testing/device_time.py."""

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxkern.testing.device_time import (
    JaxProgram,
    copy_program,
    device_alone,
    device_seconds,
    moved,
    product_program,
    seconds_of_clock,
    seconds_on_device,
)
from jaxkern.testing.rounds import Program, seconds_in_turn

__all__ = [
    "JaxProgram",
    "Program",
    "TorchProgram",
    "copy_rate",
    "device_alone",
    "device_seconds",
    "matmul_rate",
    "moved",
    "seconds_in_turn",
    "seconds_of_clock",
    "seconds_on_device",
]


@dataclasses.dataclass
class TorchProgram:
    """Calls of a torch function on several operands, between two events."""

    f: Callable
    sets: Sequence[tuple]
    host: float = 0.0

    def warm(self) -> None:
        import torch

        for _ in range(2):
            begin = time.perf_counter()
            for s in self.sets:
                self.f(*s)
            self.host = time.perf_counter() - begin
            torch.cuda.synchronize()

    def seconds(self) -> float:
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e9 * min(1e-3 + 1.5 * self.host, 0.1)))
        begin.record()
        for s in self.sets:
            self.f(*s)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3 / len(self.sets)


@functools.cache
def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy."""

    def in_torch(torch):
        a, b = (torch.randn(2**28, device="cuda") for _ in range(2))
        return lambda: b.copy_(a)

    by_jax, moves = copy_program()
    return moves / least_seconds(by_jax, in_torch)


@functools.cache
def matmul_rate() -> float:
    """Flops a second of an 8192^3 bf16 product of random data."""

    def in_torch(torch):
        options = dict(device="cuda", dtype=torch.bfloat16)
        a, b = (torch.randn(8192, 8192, **options) for _ in range(2))
        return lambda: a @ b

    by_jax, flops = product_program()
    return flops / least_seconds(by_jax, in_torch)


def least_seconds(by_jax: JaxProgram, in_torch: Callable[[Any], Callable]) -> float:
    """Of one call by jax or, where torch is here, by torch."""
    programs: dict[str, Program] = {"jax": by_jax}
    if importlib.util.find_spec("torch"):
        import torch

        programs["torch"] = TorchProgram(in_torch(torch), [()] * 4)
    with device_alone():
        for program in programs.values():
            program.warm()
        return min(seconds_in_turn(programs).values())
