"""`benchmark`: how long one call of a function takes, beside what its device can do."""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.lowering.explain import Explanation, of_arrays
from jaxkern.lowering.explain import explain as explanation
from jaxkern.testing.rounds import HostProgram, Program, times_in_turn


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
      kernels: what each operator runs, or None where it was not asked.
    """

    seconds: float
    spread: float
    bytes: float
    flops: float | None
    copy_rate: float
    product_rate: float
    device: str
    kernels: Explanation | None = None

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
        line = f"{', '.join(parts)} ({self.device})"
        return line if self.kernels is None else f"{line}\n{self.kernels}"

    __repr__ = __str__


def benchmark(
    f: Callable,
    *args: Any,
    bytes: float | None = None,
    flops: float | None = None,
    rotate: int = 1,
    explain: bool = False,
) -> Measurement:
    """Times one call of `f(*args)`, compiled, without the host's share where it can.

    On a GPU several calls stand in one executable, queued behind a kernel that waits,
    and the device's own clock is read before and after them; on other devices the
    host's clock, over so many calls that a repeat takes 20 ms at least. It is the
    median of 7 repeats. Give `f` the arrays that it reads: what it closes over is a
    constant to the compiler, which may compute with it beforehand.

    Args:
      f: a function that `jax.jit` takes.
      args: pytrees of arrays, of which at least one is there. What is no array, such as
        a flag or a number, reaches f as it is.
      bytes: that a call has to move; default those of `args` and of the results, each
        once.
      flops: that a call has to do; default what XLA counts, without what its custom
        calls do.
      rotate: how many copies of `args` take turns, so that no cache holds them: as many
        as overfill it.
      explain: whether to say which kernels run, as `jaxkern.explain` does.

    Returns:
      `Measurement`; its text is one line with time, rates and the share of the limit,
      then the kernels if asked for.

    Raises:
      TypeError: f is no function that `jax.jit` takes, or no argument is an array.
      ValueError: `rotate` is below 1, or the arguments lie on several devices.

    Example:
      >>> from jaxkern.testing import benchmark
      >>> found = benchmark(jaxkern.softmax, jnp.ones((64, 256)))
      >>> found.seconds > 0, found.bytes  # 64 x 256 float32, read and written
      (True, 131072.0)
    """
    if rotate < 1:
        raise ValueError(f"benchmark: `rotate` must be at least 1, got {rotate}.")
    called, arrays, device = arrays_of("benchmark", f, args)
    executable = lowered("benchmark", called, (arrays,)).compile()
    sets = [(arrays,), *((jax.tree.map(jnp.copy, arrays),) for _ in range(rotate - 1))]
    times = times_of(programs_of(device)(called, sets), device)
    seconds = statistics.median(times)
    if bytes is None:
        results = jax.tree.leaves(jax.eval_shape(called, arrays))
        bytes = float(sum(x.nbytes for x in arrays.values()))
        bytes += sum(x.size * x.dtype.itemsize for x in results)
    if flops is None:
        counted: Any = executable.cost_analysis() or {}
        flops = counted.get("flops")
        flops = flops if flops is not None and flops > 0 else None  # -1: not known
    copy_rate, product_rate = rates(device)
    return Measurement(
        *(seconds, (max(times) - min(times)) / seconds, bytes, flops),
        *(copy_rate, product_rate, device.device_kind),
        kernels=explanation(f, *args) if explain else None,
    )


def arrays_of(
    op: str, f: Callable, args: tuple
) -> tuple[Callable, dict[int, jax.Array], jax.Device]:
    """`f` as a function of its arrays, these, and the device on which they lie."""
    if not callable(f):
        raise TypeError(f"{op}: `f` must be a function, got {type(f).__name__}.")
    called, found = of_arrays(f, args, {})
    if not any(isinstance(x, jax.Array) for x in found.values()):
        raise TypeError(
            f"{op}: at least one argument must be a jax.Array, got "
            f"{', '.join(type(x).__name__ for x in args) or 'none'}."
        )
    if shapes := [x for x in found.values() if isinstance(x, jax.ShapeDtypeStruct)]:
        raise TypeError(f"{op}: runs `f`, so it needs arrays, got {shapes[0]}.")
    arrays = {i: jnp.asarray(x) for i, x in found.items()}
    devices = {d for x in arrays.values() for d in x.devices()}
    if len(devices) > 1:
        raise ValueError(
            f"{op}: measures on one device, the arguments lie on {len(devices)}."
        )
    [device] = devices
    own = jnp.zeros(()).devices()
    if device.platform == "gpu" and device not in own:
        raise ValueError(
            f"{op}: the clock is that of the default device, the arguments lie on "
            f"{device}. Use jax.default_device."
        )
    return called, arrays, device


def lowered(op: str, f: Callable, args: tuple) -> jax.stages.Lowered:
    try:
        return jax.jit(f).lower(*args)
    except jax.errors.JAXTypeError as error:
        first = str(error).splitlines()[0]
        raise TypeError(f"{op}: jax.jit does not take `f`: {first}") from error


def programs_of(device: jax.Device) -> Callable[[Callable, list[tuple]], Program]:
    """What makes a program of a function and its operands: by the clock that fits."""
    if device.platform != "gpu":
        return HostProgram.of
    from jaxkern.testing.device_time import JaxProgram

    return JaxProgram.of


@contextlib.contextmanager
def alone_on(device: jax.Device) -> Iterator[None]:
    """Measurements on a GPU wait for those of other processes."""
    if device.platform != "gpu":
        yield
        return
    from jaxkern.testing.device_time import device_alone

    with device_alone():
        yield


def times_of(program: Program, device: jax.Device) -> list[float]:
    """Of one call, repeat by repeat."""
    with alone_on(device):
        program.warm()
        return times_in_turn({"it": program})["it"]


@functools.cache
def rates(device: jax.Device) -> tuple[float, float]:
    """(copy, product) of a device, measured once a process."""
    if device.platform == "gpu":
        from jaxkern.testing.device_time import copy_program, product_program, rate

        return rate(*copy_program()), rate(*product_program())
    with jax.default_device(device):
        x = jnp.arange(2**25, dtype=jnp.float32)
        a = jax.random.normal(jax.random.key(0), (1024, 1024))
        programs = (
            HostProgram.of(jnp.negative, [(x,)]),
            HostProgram.of(jnp.dot, [(a, a)]),
        )
        copy, product = (min(times_of(program, device)) for program in programs)
    return 2 * x.nbytes / copy, 2 * 1024**3 / product


def in_units(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"
