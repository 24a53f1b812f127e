"""`with_oom_fallback`: runs elsewhere what does not fit into the memory of a device."""

import dataclasses
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.runtime.memory.memory_limit import (
    MemoryLimitExceeded,
    PlannedMemory,
    current_limit,
    default_device,
    is_tracer,
    memory_limit,
)
from jaxkern.runtime.trace import events, fault_points

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def with_oom_fallback(
    f: Callable,
    to: str | jax.Device | None = "cpu",
    then: Sequence[str] = (),
    *,
    axis: Any = None,
    out_axis: int = 0,
    name: str | None = None,
) -> Callable:
    """`f`, jitted; where it runs out of memory it is run again in a smaller way.

    Only an error of JAX with the status RESOURCE_EXHAUSTED and MemoryLimitExceeded
    lead to a fallback; any other error, also one of the fallback, is raised. Each way
    is tried in order until one fits; each fallback is counted (`stats`) and told
    (`events`). If none fits the first error is raised, with a note on each way.

    - `to`: on that platform or device, its inputs copied there.
    - "chunk": on the same device, in 2, 4, 8 ... parts along `axis`; each part's
      results wait in host memory. `f` must treat what lies along `axis` separately, as
      under `jax.vmap`; shapes are checked, independence is not. An explicit mesh that
      cuts `axis` must divide the parts.
    - "offload": as "chunk" (without `axis` on `to`), and the results stay in the
      host memory of their device (`pinned_host`): for results that do not fit.

    Results are committed to the devices of the arguments. The call waits for them.
    Donations that `f` asks for are void: a failed run would take the inputs with it.
    Where a step must update in place use `limited`, which asks before it donates.

    It wraps the outermost function: called under `jit` or a gradient it raises, for
    memory runs out when the outer program runs. Wrap the gradient function instead.

    Args:
      f: any traceable function of pytrees of arrays; arrays it closes over stay where
        they are.
      to: "cpu", a platform, a device, or None to go to `then` at once.
      then: "chunk" and "offload", in order.
      axis: for "chunk": an axis, or one for each positional argument as `in_axes` of
        `jax.vmap`; None marks what every part takes whole. Keywords are whole.
      out_axis: where the parts of each result are joined.
      name: in counts and events; of the function if None.

    Returns:
      The function.

    Raises:
      ValueError: `then` has another name, or "chunk" without `axis`.

    Example:
      >>> from jaxkern import runtime
      >>> safe = runtime.with_oom_fallback(lambda x: 2 * x, to="cpu")
      >>> with runtime.testing.inject_faults("execute"):  # as if the device were full
      ...     safe(jnp.ones(2))
      Array([2., 2.], dtype=float32)
    """
    for way in then:
        if way not in ("chunk", "offload"):
            raise ValueError(
                f'with_oom_fallback: `then` takes "chunk" and "offload", got {way!r}.'
            )
    if "chunk" in then and axis is None:
        raise ValueError('with_oom_fallback: "chunk" needs `axis`, got None.')
    if to is None and not then:
        raise ValueError("with_oom_fallback: neither `to` nor `then` names a way.")
    fallback = Fallback(f, to, axis, out_axis, name or getattr(f, "__name__", repr(f)))
    ways = [*([] if to is None else [f"to {to}"]), *then]

    @functools.wraps(f)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if any(map(is_tracer, jax.tree.leaves((args, kwargs)))):
            raise TypeError(
                f"with_oom_fallback: {fallback.name} is called under a transformation, "
                "where no memory is allocated yet. Wrap the outermost function: "
                "with_oom_fallback(jax.grad(f)), not jax.grad(with_oom_fallback(f))."
            )
        try:
            return fallback.run(args, kwargs)
        except (jax.errors.JaxRuntimeError, MemoryLimitExceeded) as error:
            if not is_out_of_memory(error):
                raise
            first = without_frames(error)
        return fallback.run_smaller(ways, first, args, kwargs)

    return guarded


def is_out_of_memory(error: BaseException) -> bool:
    """Is it one of the two errors that lead to a fallback?"""
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith(
        OUT_OF_MEMORY
    )
    return exhausted or isinstance(error, MemoryLimitExceeded)


def without_frames(error: BaseException) -> BaseException:
    """The error without local variables that would keep device memory alive."""
    traceback.clear_frames(error.__traceback__)
    return error.with_traceback(None)


class Fallback:
    """One function and the ways to run it."""

    def __init__(
        self, f: Callable, to: Any, axis: Any, out_axis: int, name: str
    ) -> None:
        # a jit of our own: the donations of a jitted f are void inside it
        self.jitted = jax.jit(
            functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs))
        )
        self.planned = PlannedMemory(self.jitted, name)
        self.to, self.axis, self.out_axis, self.name = to, axis, out_axis, name

    def run(self, args: tuple, kwargs: dict) -> Any:
        if fault_points.armed or current_limit() is not None:
            self.planned.check(*args, **kwargs)
        return jax.block_until_ready(self.jitted(*args, **kwargs))

    def run_smaller(
        self, ways: Sequence[str], first: BaseException, args: tuple, kwargs: dict
    ) -> Any:
        """The first way that fits; raises `first` if there is none."""
        limit_refused = isinstance(first, MemoryLimitExceeded)
        cause = "MemoryLimitExceeded" if limit_refused else OUT_OF_MEMORY
        for way in ways:
            try:
                out = self.run_way(way, args, kwargs)
            except (jax.errors.JaxRuntimeError, MemoryLimitExceeded) as error:
                if not is_out_of_memory(error):
                    raise
                first.add_note(f"with_oom_fallback: {way}: {error}")
                without_frames(error)
                continue
            events.record_fallback(self.name, cause, f"ran {way} after: {first}")
            return out
        events.record_fallback(self.name, cause, f"nothing fitted after: {first}")
        raise first

    def run_way(self, way: str, args: tuple, kwargs: dict) -> Any:
        home = self.homes(args, kwargs)
        if way == "offload":
            home = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), home)
        elsewhere = way.startswith("to ") or self.axis is None
        out = (self.on_device if elsewhere else self.in_chunks)(args, kwargs)
        return jax.block_until_ready(jax.device_put(out, home))

    def homes(self, args: tuple, kwargs: dict) -> Any:
        """The sharding of each result, as a call that fits would give it."""
        shape = jax.eval_shape(self.jitted, *args, **kwargs)
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
        devices = {d for x in arrays for d in x.sharding.device_set}
        if len(devices) > 1:
            return self.jitted.lower(*args, **kwargs).compile().output_shardings
        device = devices.pop() if devices else default_device()
        home = jax.sharding.SingleDeviceSharding(device)
        return jax.tree.map(lambda _: home, shape)

    def on_device(self, args: tuple, kwargs: dict) -> Any:
        """Results on `to`, computed there."""
        to = "cpu" if self.to is None else self.to
        device = jax.devices(to)[0] if isinstance(to, str) else to
        there = jax.sharding.SingleDeviceSharding(
            device
        )  # a bare device keeps the mesh
        args, kwargs = jax.tree.map(
            lambda x: jax.device_put(x, there) if is_array(x) else x, (args, kwargs)
        )
        with jax.default_device(device), memory_limit(None):
            return self.jitted(*args, **kwargs)

    def in_chunks(self, args: tuple, kwargs: dict) -> Any:
        """Results as NumPy arrays, computed in 2, 4, 8 ... parts along `axis`."""
        axes, n = self.axes_of(args)
        parts = 2
        while True:
            try:
                return self.in_parts(min(parts, n), axes, n, args, kwargs)
            except (jax.errors.JaxRuntimeError, MemoryLimitExceeded) as error:
                if parts >= n or not is_out_of_memory(error):
                    raise
                without_frames(error)
            parts *= 2

    def in_parts(
        self, parts: int, axes: list, n: int, args: tuple, kwargs: dict
    ) -> Any:
        size = max(1, -(-n // max(1, parts)))
        leaves, tree = jax.tree.flatten(args)
        whole = jax.eval_shape(self.jitted, *args, **kwargs)

        def part(start: int) -> Any:
            end = min(start + size, n)
            cut = [
                x if a is None else jax.lax.slice_in_dim(x, start, end, axis=a)
                for x, a in zip(leaves, axes, strict=True)
            ]
            out = self.run(jax.tree.unflatten(tree, cut), kwargs)
            jax.tree.map(functools.partial(self.check_part, end - start, n), out, whole)
            return jax.tree.map(HostPart.of, out)

        results = [part(start) for start in range(0, max(1, n), size)]
        return jax.tree.map(lambda *ys: joined(ys, self.out_axis), *results)

    def check_part(self, size: int, n: int, y: jax.Array, whole: Any) -> None:
        expected = list(whole.shape)
        joined = -whole.ndim <= self.out_axis < whole.ndim
        if joined and expected[self.out_axis] == n:
            expected[self.out_axis] = size
            if list(y.shape) == expected:
                return
        raise TypeError(
            f"with_oom_fallback: {self.name} gives {whole.shape} for the whole and "
            f"{y.shape} for {size} of {n}: its parts cannot be joined along `out_axis` "
            f'{self.out_axis}. Leave "chunk" out, or return what lies along `axis`.'
        )

    def axes_of(self, args: tuple) -> tuple[list, int]:
        """For each leaf of the arguments its axis or None, and the common size."""
        axis = tuple(self.axis) if isinstance(self.axis, list | tuple) else self.axis

        def is_whole(a: Any) -> bool:
            return a is None

        def of_part(a: int | None, part: Any) -> list:
            return [a] * len(jax.tree.leaves(part))

        spread = jax.tree.map(of_part, axis, args, is_leaf=is_whole)
        axes = jax.tree.leaves(spread, is_leaf=is_whole)
        sizes = {
            jnp.shape(x)[a]
            for x, a in zip(jax.tree.leaves(args), axes, strict=True)
            if a is not None
        }
        if len(sizes) != 1:
            raise TypeError(
                f"with_oom_fallback: the arguments of {self.name} have sizes "
                f"{sorted(sizes)} along `axis` {self.axis}: give None for those that "
                "every part takes whole."
            )
        return axes, sizes.pop()


@dataclasses.dataclass(frozen=True)
class HostPart:
    """One part of one result in host memory; PRNG keys as the numbers they are."""

    numbers: np.ndarray
    ndim: int
    key_impl: Any = None

    @classmethod
    def of(cls, y: jax.Array) -> Self:
        if not jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            return cls(jax.device_get(y), y.ndim)
        numbers = jax.device_get(jax.random.key_data(y))
        return cls(numbers, y.ndim, jax.random.key_impl(y))


def joined(parts: Sequence[HostPart], axis: int) -> Any:
    first = parts[0]
    # the numbers of a key lie behind its dims
    axis = axis % first.ndim if first.ndim else axis
    whole = np.concatenate([part.numbers for part in parts], axis)
    if first.key_impl is None:
        return whole
    return jax.random.wrap_key_data(jnp.asarray(whole), impl=first.key_impl)


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)
