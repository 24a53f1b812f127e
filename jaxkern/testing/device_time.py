"""Time of programs on a GPU, taken in turn.

A figure is the time of one call inside an executable that makes several calls on
different buffers, so neither Python nor the cache is measured. The executable is queued
behind a kernel that waits, and the device's own clock is read before and after it: a
launch takes the host up to 20 us, more than many kernels take. What is compared runs
round by round, each program once a round, so that all meet the same heat and load.
"""

import contextlib
import dataclasses
import fcntl
import functools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.gpu.triton_call import jit, tl, triton_call
from jaxkern.testing.rounds import REPEATS, seconds_in_turn

_lock = threading.RLock()
_holders: list[IO] = []  # the open file of the lock that this process has


@contextlib.contextmanager
def device_alone() -> Iterator[None]:
    """Benchmarks of one device compile side by side and measure in turn.

    A process that has the device may ask for it again.
    """
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
    path = Path(tempfile.gettempdir()) / f"jaxkern-device-{device}"
    with _lock, contextlib.ExitStack() as stack:
        if not _holders:
            _holders.append(stack.enter_context(path.open("w")))
            stack.callback(_holders.clear)
            fcntl.flock(_holders[0], fcntl.LOCK_EX)
        yield


@jit
def wait_kernel(nanoseconds_ptr, out_ptr, WARP: tl.constexpr):
    """Occupies the device until its clock is so much further."""
    t = tl.inline_asm_elementwise(
        """{ .reg .u64 t, end; .reg .pred p;
        mov.u64 t, %globaltimer; add.u64 end, t, $1;
        AGAIN: mov.u64 t, %globaltimer; setp.lt.u64 p, t, end; @p bra AGAIN;
        mov.u64 $0, t; }""",
        "=l,l",
        [tl.load(nanoseconds_ptr).to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr, t.to(tl.int32))


@jit
def clock_kernel(any_ptr, out_ptr, WARP: tl.constexpr):
    """Low and high half of the device's clock, in nanoseconds."""
    t = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;",
        "=l,r",
        [tl.load(any_ptr)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr, t.to(tl.int32))
    tl.store(out_ptr + 1, (t >> 32).to(tl.int32))


@functools.cache
def compiled_clock() -> tuple[Callable, Callable]:
    """The two kernels above, of an array of nanoseconds."""

    def call(kernel, size):
        out = [jax.ShapeDtypeStruct((size,), jnp.int32)]
        f = functools.partial(
            triton_call, kernel, out=out, grid=(1,), num_warps=1, WARP=1
        )
        return jax.jit(f).lower(jnp.zeros(1, jnp.int32)).compile()

    return call(wait_kernel, 1), call(clock_kernel, 2)


def seconds_on_device(run: Callable[[], Any], host_seconds: float) -> float:
    """From before to after what `run` queues, though that takes the host a while."""
    wait, clock = compiled_clock()
    nanoseconds = jnp.full(1, 1e9 * min(1e-3 + 1.5 * host_seconds, 0.1), jnp.int32)
    wait(nanoseconds)
    before = clock(nanoseconds)
    out = run()
    after = clock(nanoseconds)
    begin, end = (
        int(np.asarray(halves).view(np.uint64)[0]) for [halves] in (before, after)
    )
    del out
    return (end - begin) * 1e-9


@functools.cache
def seconds_of_clock() -> float:
    """Between two readings with nothing between them."""
    return statistics.median(
        seconds_on_device(lambda: None, 0.0) for _ in range(3 * REPEATS)
    )


@dataclasses.dataclass
class JaxProgram:
    """Calls of a function on several operands, in one executable."""

    executable: Callable
    sets: Sequence[tuple]
    host: float = 0.0

    @classmethod
    def of(cls, f: Callable, sets: Sequence[tuple]) -> "JaxProgram":
        def every(sets):
            return [f(*s) for s in sets]

        return cls(jax.jit(every).lower(sets).compile(), sets)

    def warm(self) -> None:
        jax.block_until_ready(self.executable(self.sets))
        begin = time.perf_counter()
        out = self.executable(self.sets)
        self.host = time.perf_counter() - begin
        jax.block_until_ready(out)

    def seconds(self) -> float:
        took = seconds_on_device(lambda: self.executable(self.sets), self.host)
        return (took - seconds_of_clock()) / len(self.sets)


def device_seconds(f: Callable, sets: Sequence[tuple]) -> float:
    """Seconds of one `f(*set)`."""
    program = JaxProgram.of(f, sets)
    with device_alone():
        program.warm()
        return seconds_in_turn({"f": program})["f"]


@jit
def sum_kernel(in_ptrs, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(in_ptrs[0] + at, eviction_policy="evict_first")
    for k in tl.static_range(1, len(in_ptrs)):
        total += tl.load(in_ptrs[k] + at, eviction_policy="evict_first")
    tl.store(out_ptr + at, total)


def moved(*arrays: jax.Array) -> jax.Array:
    """Their sum, by the fastest kernel found that reads and writes as many bytes."""
    out = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)]
    block = 2048
    grid = (arrays[0].size // block,)
    [total] = triton_call(
        sum_kernel, [*arrays], out=out, grid=grid, num_warps=8, BLOCK=block
    )
    return total


@functools.cache
def copy_program() -> tuple[JaxProgram, int]:
    """A large copy, and the bytes that it reads and writes."""
    with device_alone():
        x = jnp.arange(2**28, dtype=jnp.float32)
        sets = jax.block_until_ready([(x,), (x + 1,)])
    return JaxProgram.of(jnp.negative, sets), 2 * x.nbytes


@functools.cache
def product_program() -> tuple[JaxProgram, int]:
    """An 8192^3 bf16 product of random data, and its flops."""
    keys = jax.random.split(jax.random.key(0), 8)
    draw = jax.jit(lambda k: jax.random.normal(k, (8192, 8192), jnp.bfloat16))
    with device_alone():
        pairs = [(draw(a), draw(b)) for a, b in keys.reshape(4, 2)]
        jax.block_until_ready(pairs)
    return JaxProgram.of(jnp.dot, pairs), 2 * 8192**3


def rate(program: JaxProgram, work: int) -> float:
    """Units of work a second."""
    with device_alone():
        program.warm()
        return work / seconds_in_turn({"it": program})["it"]
