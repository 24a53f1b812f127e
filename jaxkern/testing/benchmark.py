"""`benchmark`: how long one call of a function takes, beside what its device can do."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 7
LEAST_SECONDS = 0.02  # of a repeat on a CPU: many short calls, one long one


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What `benchmark` found of one call.

    Attributes:
      seconds: median of the repeats.
      spread: from the fastest repeat to the slowest, as a share of `seconds`.
      bytes: that the call has to read and write.
      flops: that it has to do, or None where nobody knows.
      copy_rate: bytes a second, read and written, of a large copy on the device.
      product_rate: flops a second of a large product: bfloat16 on a GPU, else float32.
      device: its name.
    """

    seconds: float
    spread: float
    bytes: float
    flops: float | None
    copy_rate: float
    product_rate: float
    device: str

    @property
    def least_seconds(self) -> float:
        """What its bytes or its flops need at the device's rates, whichever is more."""
        by_bytes = self.bytes / self.copy_rate
        return max(by_bytes, (self.flops or 0.0) / self.product_rate)

    @property
    def share(self) -> float:
        """`least_seconds / seconds`; above 1 where a cache has held the operands."""
        return self.least_seconds / self.seconds

    def __str__(self) -> str:
        gigabytes = self.bytes / self.seconds / 1e9
        parts = [f"{in_units(self.seconds)} +- {50 * self.spread:.0f} %"]
        parts.append(f"{gigabytes:.3g} GB/s")
        if self.flops:
            parts.append(f"{self.flops / self.seconds / 1e9:.3g} GFLOP/s")
        limit = (
            "bytes" if self.bytes / self.copy_rate == self.least_seconds else "flops"
        )
        parts.append(f"{100 * self.share:.0f} % of the limit by {limit}")
        return f"{', '.join(parts)} ({self.device})"

    __repr__ = __str__


def benchmark(
    f: Callable,
    *args: Any,
    bytes: float | None = None,
    flops: float | None = None,
    rotate: int = 1,
) -> Measurement:
    """Times one call of `f(*args)`, compiled, without the host's share where it can.

    On a GPU several calls stand in one executable, queued behind a kernel that waits,
    and the device's own clock is read before and after them; on other devices the
    host's clock, over so many calls that a repeat takes 20 ms at least. It is the
    median of 7 repeats. Give `f` the arrays that it reads: what it closes over is a
    constant to the compiler, which may compute with it beforehand.

    Args:
      f: a function that `jax.jit` takes.
      args: pytrees of arrays, of which at least one is there.
      bytes: that a call has to move; default those of `args` and of the results, each
        once.
      flops: that a call has to do; default what XLA counts, without what its custom
        calls do.
      rotate: how many copies of `args` take turns, so that no cache holds them: as many
        as overfill it.

    Returns:
      `Measurement`; its text is one line with time, rates and the share of the limit.

    Raises:
      TypeError: no argument is an array.
      ValueError: `rotate` is below 1.

    Example:
      >>> from jaxkern.testing import benchmark
      >>> found = benchmark(jaxkern.softmax, jnp.ones((64, 256)))
      >>> found.seconds > 0, found.bytes  # 64 x 256 float32, read and written
      (True, 131072.0)
    """
    leaves = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    if not leaves:
        raise TypeError(
            "benchmark: at least one argument must be a jax.Array, got "
            f"{', '.join(type(x).__name__ for x in args) or 'none'}."
        )
    if rotate < 1:
        raise ValueError(f"benchmark: `rotate` must be at least 1, got {rotate}.")
    [device, *_] = leaves[0].devices()
    executable = jax.jit(f).lower(*args).compile()
    results = jax.tree.leaves(jax.eval_shape(f, *args))
    sets = [args] + [jax.tree.map(copied, args) for _ in range(rotate - 1)]
    of_gpu = device.platform == "gpu"
    times = seconds_on_gpu(f, sets) if of_gpu else seconds_by_host(executable, sets)
    seconds = statistics.median(times)
    if bytes is None:
        bytes = float(sum(x.size * x.dtype.itemsize for x in (*leaves, *results)))
    if flops is None:
        counted: Any = executable.cost_analysis() or {}
        flops = counted.get("flops")
        flops = flops if flops is not None and flops > 0 else None  # -1: not known
    copy_rate, product_rate = rates(of_gpu)
    return Measurement(
        *(seconds, (max(times) - min(times)) / seconds, bytes, flops),
        *(copy_rate, product_rate, device.device_kind),
    )


def copied(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def seconds_on_gpu(f: Callable, sets: list[tuple]) -> list[float]:
    """Of one call, by the device's clock."""
    from jaxkern.testing.device_time import JaxProgram, device_alone

    program = JaxProgram.of(f, sets)
    with device_alone():
        program.warm()
        return [program.seconds() for _ in range(REPEATS)]


def seconds_by_host(executable: Callable, sets: list[tuple]) -> list[float]:
    """Of one call, from before it is queued until its result is there."""

    def run(calls: int) -> float:
        begin, out = time.perf_counter(), None
        for i in range(calls):
            out = executable(*sets[i % len(sets)])
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / calls

    run(len(sets))
    calls = len(sets) * max(1, round(LEAST_SECONDS / run(len(sets)) / len(sets)))
    return [run(calls) for _ in range(REPEATS)]


@functools.cache
def rates(of_gpu: bool) -> tuple[float, float]:
    """(copy, product) of this machine's device, measured once a process."""
    if of_gpu:
        from jaxkern.testing.device_time import copy_program, product_program, rate

        return rate(*copy_program()), rate(*product_program())
    x = jnp.arange(2**25, dtype=jnp.float32)
    a = jax.random.normal(jax.random.key(0), (1024, 1024))
    copy, product = (
        min(seconds_by_host(jax.jit(f).lower(*z).compile(), [z]))
        for f, z in ((jnp.negative, (x,)), (jnp.dot, (a, a)))
    )
    return 2 * x.nbytes / copy, 2 * 1024**3 / product


def in_units(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"
