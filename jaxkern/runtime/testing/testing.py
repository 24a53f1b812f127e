"""For the tests of users: failures on demand, and float64 oracles.

with inject_faults("execute", after=1):
    ...  # the second run of a guarded function is out of memory
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import primitives
from jaxkern.lowering.lower import backend
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.runtime.trace import fault_points
from jaxkern.runtime.trace.fault_points import POINTS, FaultPlan


@contextlib.contextmanager
def inject_faults(
    point: str,
    after: int = 0,
    times: int | None = 1,
    error: BaseException | None = None,
) -> Iterator[FaultPlan]:
    """Makes the host code fail at a point, in every thread, while the block runs.

    - "alloc": `MemoryTracker.reserve`, a new buffer of `BufferPool`, the memory check
      of a guarded call or of `upload`;
    - "compile": a new signature of a guarded function;
    - "execute": a guarded call, a part of one that is cut, but not a run elsewhere;
    - "upload": each leaf that `upload` moves;
    - the name of an op: an eager call of it, and a guarded call whose program has it,
      gradients included.

    Guarded are `limited` functions and those of `with_oom_fallback`. Nothing is traced,
    compiled programs stay as they are, and without a block the points cost a look at an
    empty tuple.

    Args:
      point: which.
      after: passes first.
      times: failures after that, None for all.
      error: what is raised; the JaxRuntimeError of a device without memory if None.

    Yields:
      The plan; its `hits` and `raised` count.

    Raises:
      ValueError: no such point, or a negative number.

    Example:
      >>> from jaxkern import runtime
      >>> safe = runtime.with_oom_fallback(jnp.sin)
      >>> with runtime.testing.inject_faults("execute", times=1) as plan:
      ...     y = safe(jnp.zeros(2))
      >>> plan.hits, plan.raised
      (1, 1)
    """
    if point not in POINTS and point not in REGISTRY:
        raise ValueError(
            f"inject_faults: `point` must be one of {', '.join(POINTS)} or the name "
            f"of an op, got {point!r}."
        )
    if after < 0 or (times is not None and times < 0):
        raise ValueError(f"inject_faults: got after={after}, times={times}.")
    out_of_memory = jax.errors.JaxRuntimeError(
        f"RESOURCE_EXHAUSTED: Out of memory, injected at {point}."
    )
    plan = FaultPlan(point, after, times, error or out_of_memory)
    members = members_of(REGISTRY[point]) if point in REGISTRY else ()
    fault_points.arm(plan)
    for p in members:
        watch(p, point)
    try:
        yield plan
    finally:
        for p in members:
            unwatch(p)
        fault_points.disarm(plan)


def members_of(p: KernelPrimitive) -> tuple:
    return tuple(m for m in (p, p.fwd, p.bwd, p.tangent) if m is not None)


_watched: dict[Any, tuple[Callable, int]] = {}  # how a primitive runs eagerly, blocks
_lock = threading.Lock()


def watch(p: Any, point: str) -> None:
    """Lets eager calls of a primitive reach the point until `unwatch`."""
    with _lock:
        run, blocks = _watched.get(p, (p.impl, 0))
        _watched[p] = run, blocks + 1

        def hit_and_run(*arrays: Any, **params: Any) -> Any:
            fault_points.hit(point)
            return run(*arrays, **params)

        p.def_impl(hit_and_run)


def unwatch(p: Any) -> None:
    with _lock:
        run, blocks = _watched.pop(p)
        if blocks > 1:
            _watched[p] = run, blocks - 1
        else:
            p.def_impl(run)


def reference(op: str | Callable) -> Callable:
    """The op in float64 on the host: what a test compares with.

        y = reference("rms_norm")(x, weight)  # numpy, float64

    Its reference, not a kernel, runs on float64 copies of the operands' values; an
    option such as `dtype=` counts as ever.

    Args:
      op: a name, a public function, a primitive, or any traceable function.

    Returns:
      A function with the same arguments that gives NumPy arrays, floats in float64.

    Raises:
      ValueError: no op of that name.

    Example:
      >>> from jaxkern import runtime
      >>> runtime.testing.reference("softmax")(jnp.zeros((1, 4), jnp.bfloat16))
      array([[0.25, 0.25, 0.25, 0.25]])
    """
    f = named_op(op)

    @functools.wraps(f)
    def oracle(*args: Any, **options: Any) -> Any:
        cpu = jax.devices("cpu")[0]
        with jax.enable_x64(True), jax.default_device(cpu), backend("xla"):
            wide = jax.tree.map(in_float64, (args, options))
            out = f(*wide[0], **wide[1])
            return jax.tree.map(np.asarray, out)

    return oracle


def named_op(op: str | Callable) -> Callable:
    """The public function of that name, else the primitive."""
    if not isinstance(op, str):
        return op
    families = [getattr(primitives, family) for family in primitives.__all__]
    for family in families:
        if op in family.__all__:
            return getattr(family, op)
    if op not in REGISTRY:
        raise ValueError(f"reference: no op of jaxkern is called {op!r}.")
    return REGISTRY[op]


def in_float64(x: Any) -> Any:
    if not hasattr(x, "dtype"):
        return x  # an option
    x = np.asarray(x)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x.astype(np.float64) if is_float else x)
