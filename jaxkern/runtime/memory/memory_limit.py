"""A limit on device memory, asked before a program runs.

    requested = outputs + temporaries + code - donated [+ arguments not on the device]

as XLA planned them for one device; the arguments that are there belong to what is
allocated already. A call is refused where allocated + requested exceeds the limit.
"""

import collections
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jaxkern.lowering.explain import every_equation
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.runtime.trace import events, fault_points

MAX_PLANS = 256  # signatures whose planned memory a `limited` function remembers


class MemoryLimitExceeded(MemoryError):
    """A call would take more memory than is allowed; nothing has run.

    Attributes:
      requested: bytes that the call would add on one device.
      allocated: bytes in use there.
      limit: bytes allowed there.
      breakdown: bytes by purpose; "donated" is negative.
    """

    def __init__(
        self,
        requested: int,
        allocated: int,
        limit: int,
        breakdown: Mapping[str, int] | None = None,
        name: str = "memory_limit",
    ):
        super().__init__(requested, allocated, limit, breakdown, name)
        self.requested, self.allocated, self.limit = requested, allocated, limit
        self.breakdown, self.name = dict(breakdown or {}), name

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {v:,}" for k, v in self.breakdown.items() if v)
        needs = f"{self.requested:,} bytes" + (f" ({parts})" if parts else "")
        return (
            f"{self.name}: needs {needs}, {self.allocated:,} are allocated, the limit "
            f"is {self.limit:,}. Free or donate arrays, make the call smaller, or use "
            "with_oom_fallback."
        )


_limit: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "jaxkern_memory_limit", default=None
)


@contextlib.contextmanager
def memory_limit(num_bytes: int | None) -> Iterator[None]:
    """Bounds the memory of each device for what this thread calls in the block.

    Asked by `limited` functions, `with_oom_fallback` (whose host runs are free),
    `upload` and `BufferPool`. A plain `jax.jit` call or an eager operation is not:
    JAX has no place to ask. Blocks nest, the innermost counts.

    Args:
      num_bytes: of one device, everything on it included; None for no limit.

    Raises:
      ValueError: `num_bytes` is negative or NaN.

    Example:
      >>> from jaxkern import runtime
      >>> double = runtime.limited(lambda x: 2 * x)
      >>> with runtime.memory_limit(runtime.allocated_bytes() + 1_000_000):
      ...     print(double(jnp.ones(3)))
      [2. 2. 2.]
    """
    if num_bytes is not None and not num_bytes >= 0:  # so that NaN is refused
        raise ValueError(f"memory_limit: `num_bytes` must be >= 0, got {num_bytes}.")
    token = _limit.set(num_bytes)
    try:
        yield
    finally:
        _limit.reset(token)


def current_limit() -> int | None:
    """The limit of the block that this thread is in, in bytes, or None."""
    return _limit.get()


def allocated_bytes(device: jax.Device | None = None) -> int:
    """Bytes in use on a device: the allocator's count, or that of the live arrays.

    A CPU's allocator does not count; there buffers shared by several arrays count once.

    Args:
      device: the default device if None.

    Example:
      >>> from jaxkern import runtime
      >>> x = jnp.zeros((256, 256))
      >>> runtime.allocated_bytes() >= x.nbytes
      True
    """
    held_by: Any = default_device() if device is None else device
    counted = held_by.memory_stats()
    if counted is not None:
        return counted["bytes_in_use"]
    sizes: dict[int, int] = {}
    for array in jax.live_arrays(held_by.platform):
        if held_by not in array.sharding.device_set:
            continue
        with contextlib.suppress(RuntimeError):  # deleted by another thread meanwhile
            for shard in array.addressable_shards:
                if shard.device == held_by and shard.data.nbytes:
                    sizes[buffer_address(shard.data)] = shard.data.nbytes
    return sum(sizes.values())


def buffer_address(array: jax.Array) -> int:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return array.unsafe_buffer_pointer()


def default_device() -> Any:
    device: Any = jax.config.jax_default_device  # pyright: ignore
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


def limited(f: Callable) -> Callable:
    """`f`, jitted, that asks the `memory_limit` in force before each call.

    Outside a `memory_limit` block the call is `jax.jit`'s own. Inside, a new signature
    is compiled first, once: the executable that was asked is the one that runs.
    Called under a transformation it is part of the outer program, which is not asked.

    Args:
      f: a traceable function, the result of `jax.jit` with its donations, or an
        executable: a `jax.stages.Compiled`, or what has one as its `compiled`.

    Returns:
      The function; it raises MemoryLimitExceeded before anything runs or is donated.

    Example:
      >>> from jaxkern import runtime
      >>> outer = runtime.limited(jnp.outer)
      >>> with runtime.memory_limit(1000):
      ...     try: outer(jnp.ones(64), jnp.ones(64))
      ...     except runtime.MemoryLimitExceeded as e: print(e.breakdown["outputs"])
      16384
    """
    name = getattr(f, "__name__", type(f).__name__)
    compiled = getattr(f, "compiled", f)
    if isinstance(compiled, jax.stages.Compiled):
        run, planned = f, CompiledMemory(compiled, name)
    else:
        run = f if hasattr(f, "trace") else jax.jit(f)
        planned = PlannedMemory(run, name)

    @functools.wraps(f)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if _limit.get() is not None or fault_points.armed:
            if not any(map(is_tracer, jax.tree.leaves((args, kwargs)))):
                planned.check(*args, **kwargs)
        return run(*args, **kwargs)

    return checked


def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


class CompiledMemory:
    """What XLA planned for an executable, and its check."""

    def __init__(self, compiled: jax.stages.Compiled, name: str):
        self.breakdown, self.name = planned_bytes(compiled), name
        shardings = (compiled.output_shardings, compiled.input_shardings)
        devices = [d for s in jax.tree.leaves(shardings) for d in s.device_set]
        self.devices = frozenset(devices or [default_device()])

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raises MemoryLimitExceeded if the call would exceed the limit in force."""
        leaves = jax.tree.leaves((args, kwargs))
        away = sum(bytes_to_move(x, self.devices) for x in leaves)
        need = {"arguments": away, **self.breakdown}
        check_request(need, self.devices, self.name)
        fault_points.hit("execute")


class PlannedMemory:
    """What XLA planned for each signature of a jitted function, and its check."""

    def __init__(self, jitted: Any, name: str):
        self.jitted, self.name = jitted, name
        self.plans: collections.OrderedDict[tuple, CompiledMemory]
        self.plans = collections.OrderedDict()
        self.lock = threading.Lock()

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raises MemoryLimitExceeded if the call would exceed the limit in force."""
        traced = self.jitted.trace(*args, **kwargs)
        hit_points_of(traced.jaxpr)
        leaves = jax.tree.leaves((args, kwargs))
        placed = tuple(getattr(x, "sharding", None) for x in leaves)
        # the jaxpr is the same object as long as jit would not trace anew
        key = (traced.jaxpr, placed)
        with self.lock:
            plan = self.plans.get(key)
        if plan is None:
            fault_points.hit("compile")
            plan = CompiledMemory(traced.lower().compile(), self.name)
            with self.lock:
                self.plans[key] = plan
                if len(self.plans) > MAX_PLANS:
                    self.plans.popitem(last=False)
        plan.check(*args, **kwargs)


def planned_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """What a call adds to the memory of a device, by purpose."""
    plan: Any = compiled.memory_analysis()
    if plan is None:
        raise RuntimeError(
            "memory_limit: this platform does not say what a program allocates; "
            "use MemoryTracker."
        )
    return {
        "outputs": plan.output_size_in_bytes,
        "temporaries": plan.temp_size_in_bytes,
        "code": plan.generated_code_size_in_bytes,
        "donated": -plan.alias_size_in_bytes,
    }


def bytes_to_move(x: Any, devices: Set[jax.Device]) -> int:
    """Bytes on one device of an argument that is not there yet."""
    if isinstance(x, jax.Array) and x.sharding.device_set <= devices:
        return 0
    return getattr(x, "nbytes", 0)


def check_request(
    breakdown: Mapping[str, int], devices: Set[jax.Device], name: str
) -> None:
    """Raises MemoryLimitExceeded if the bytes do not fit on one of the devices."""
    fault_points.hit("alloc")
    limit = _limit.get()
    if limit is None:
        return
    requested = sum(breakdown.values())
    here = [d for d in devices if d.process_index == jax.process_index()]
    allocated = max(map(allocated_bytes, here), default=0)
    if allocated + requested > limit:
        error = MemoryLimitExceeded(requested, allocated, limit, breakdown, name)
        events.record_refusal(name, requested, str(error))
        raise error


def hit_points_of(jaxpr: Any) -> None:
    """The fault points of the ops in a program, once for each op."""
    if fault_points.armed:
        found = {eqn.primitive for eqn in every_equation(jaxpr)}
        for name, op in REGISTRY.items():
            if found & {op, op.fwd, op.bwd, op.tangent}:
                fault_points.hit(name)
