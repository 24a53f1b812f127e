"""One function for any extent of an axis, from a few executables for fixed extents."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.runtime.plan.compile import compile
from jaxkern.runtime.plan.plan import Plan

Axes = int | None | Sequence[int | None]


def bucketed(
    f: Callable,
    axis: Axes,
    out_axis: Axes = ...,  # type: ignore[assignment]
    *,
    buckets: Sequence[int] = (128, 256, 512, 1024, 2048, 4096),
    length: str | None = None,
    check: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> "Bucketed":
    """Calls a function at the next larger of some sizes, and cuts the results back.

    `f` is compiled once per size; each extent compiles its padding and its cut alone.

    The results are exact in the live extent if what `f` puts there does not depend on
    what lies behind it. This is tried, not assumed: the first padded call of each size
    also runs with two different paddings and raises if the results differ. A function
    that mixes along the axis (a softmax, a mean) must mask by the length it is given.

    Args:
      f: of arrays or pytrees of arrays.
      axis: that varies, of every array of every argument; or one axis per argument,
        None where an argument has a fixed size.
      out_axis: likewise for the results, which are then a tuple if a sequence is given;
        as `axis` if left out.
      buckets: sizes to compile for.
      length: name of a keyword argument of `f` that gets the live extent, an int32
        scalar.
      check: compare two paddings at the first call of each size.
      compiler_options: of XLA.

    Returns:
      A `Bucketed`, called as `f` without the length.

    Raises:
      ValueError: no bucket, or one below 1; at the call, an `axis` that an array does
        not have, an extent above the largest bucket or results that depend on the
        padding.

    Example:
      >>> from jaxkern import runtime
      >>> double = runtime.bucketed(lambda x: 2 * x, 0, buckets=(4, 8))
      >>> double(jnp.arange(3.0)), double.compiled_buckets
      (Array([0., 2., 4.], dtype=float32), (4,))
    """
    sizes = tuple(sorted(set(map(int, buckets))))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"bucketed: `buckets` must be at least 1, got {buckets}.")
    if out_axis is ...:
        if not isinstance(axis, int):
            raise ValueError("bucketed: one axis per argument needs an `out_axis`.")
        out_axis = axis
    return Bucketed(f, axis, out_axis, sizes, length, check, compiler_options or {})


class Bucketed:
    """A function with one executable per size in use; see `bucketed`.

    Attributes:
      buckets: sizes that it can compile for, ascending.
      plans: `Plan`s by size and types of the arguments, as far as they were needed.
    """

    def __init__(
        self,
        f: Callable,
        axis: Axes,
        out_axis: Axes,
        buckets: tuple[int, ...],
        length: str | None,
        check: bool,
        options: dict[str, Any],
    ):
        self.function, self.axis, self.out_axis = f, axis, out_axis
        self.buckets, self.length, self.check = buckets, length, check
        self.options = options
        self.plans: dict[tuple, Plan] = {}
        self.checked: set[tuple] = set()
        self.lock = threading.Lock()

    @property
    def compiled_buckets(self) -> tuple[int, ...]:
        """Sizes for which there is an executable."""
        return tuple(sorted({key[0] for key in self.plans}))

    def __call__(self, *args: Any) -> Any:
        axes = axes_of(self.axis, args, "argument")
        extent = self.extent(axes, args)
        bucket = self.bucket(extent)
        types = jax.tree.map(lambda x: padded_type(x, None, 0), args)
        types = grow(padded_type, axes, types, bucket)
        leaves, tree = jax.tree.flatten(types)
        key = (bucket, tree, tuple((t.shape, t.dtype) for t in leaves))
        plan = self.plans.get(key)
        if plan is None:
            plan = self.compile(key, types)
        if self.check and extent < bucket and key not in self.checked:
            outs = [self.run(plan, axes, args, bucket, extent, fill) for fill in (0, 1)]
            require_same(*outs)
            self.checked.add(key)
        return self.run(plan, axes, args, bucket, extent, 0)

    def run(
        self,
        plan: Plan,
        axes: tuple[int | None, ...],
        args: tuple,
        bucket: int,
        extent: int,
        fill: int,
    ) -> Any:
        """One call, padded by zeros (`fill` 0) or by what shows in a result (1)."""
        padded = pad_all(axes, args, bucket, fill)
        out = plan(np.int32(extent), *padded)
        several = isinstance(self.out_axis, Sequence)
        if several and not isinstance(out, tuple):
            raise TypeError(
                f"bucketed: `f` returns one result, `out_axis` has {self.out_axis}."
            )
        outs = out if several else (out,)
        out_axes = axes_of(self.out_axis, outs, "result")
        check_results(out_axes, outs, bucket)
        outs = cut_all(out_axes, outs, extent)
        return outs if several else outs[0]

    def bucket(self, extent: int) -> int:
        """The size that an extent runs at."""
        for size in self.buckets:
            if extent <= size:
                return size
        raise ValueError(
            f"bucketed: the extent {extent} is above the largest bucket, "
            f"{self.buckets[-1]}."
        )

    def extent(self, axes: tuple[int | None, ...], args: tuple) -> int:
        cut = [
            (axis, jnp.shape(leaf))
            for axis, arg in zip(axes, args, strict=True)
            if axis is not None
            for leaf in jax.tree.leaves(arg)
        ]
        for axis, shape in cut:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"bucketed: `axis` must name a dim of every array, got {axis} for "
                    f"one of shape {shape}. None marks an argument of a fixed size."
                )
        found = {shape[axis] for axis, shape in cut}
        if len(found) != 1:
            raise TypeError(
                f"bucketed: the arrays must agree in their axis, got {sorted(found)}."
            )
        return found.pop()

    def compile(self, key: tuple, types: tuple) -> Plan:
        length = jax.ShapeDtypeStruct((), jnp.int32)
        made = compile(self.with_length, length, *types, compiler_options=self.options)
        with self.lock:  # compiled outside of it: other sizes need not wait
            return self.plans.setdefault(key, made)

    def with_length(self, length: jax.Array, *args: Any) -> Any:
        named = {self.length: length} if self.length else {}
        return self.function(*args, **named)


def require_same(one: Any, other: Any) -> None:
    """Bit for bit: a NaN equals itself."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise ValueError(
                "bucketed: the results in the live extent depend on the padding behind "
                "it. Give `f` the live extent with `length=` and mask by it."
            )


def axes_of(axis: Axes, values: Sequence, what: str) -> tuple[int | None, ...]:
    if isinstance(axis, int | None):
        return (axis,) * len(values)
    if len(axis) != len(values):
        raise TypeError(f"bucketed: {len(axis)} axes for {len(values)} {what}s.")
    return tuple(axis)


def grow(f: Callable, axes: Sequence[int | None], args: tuple, size: int) -> tuple:
    """`f(x, axis, size)` of every array of the arguments that have an axis."""
    return tuple(
        arg if axis is None else jax.tree.map(lambda x, a=axis: f(x, a, size), arg)
        for axis, arg in zip(axes, args, strict=True)
    )


def padded_type(x: Any, axis: int | None, size: int) -> jax.ShapeDtypeStruct:
    sizes = list(jnp.shape(x))
    if axis is not None:
        sizes[axis] = size
    return jax.ShapeDtypeStruct(tuple(sizes), jnp.result_type(x))


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def pad_all(axes: tuple[int | None, ...], args: tuple, size: int, fill: int) -> tuple:
    """Every array grown to `size`, by zeros (0) or by NaN and large numbers (1)."""

    def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths, constant_values=poison(x.dtype) if fill else 0)

    return grow(pad, axes, args, size)


def poison(dtype: Any) -> Any:
    """What shows up in a result that reads it."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def check_results(axes: Sequence[int | None], outs: Sequence, bucket: int) -> None:
    for axis, out in zip(axes, outs, strict=True):
        for x in jax.tree.leaves(out):
            if axis is not None and (x.ndim <= axis or x.shape[axis] != bucket):
                raise TypeError(
                    f"bucketed: a result has shape {x.shape}; its axis {axis} must "
                    f"have the size {bucket} of the arguments. Set `out_axis`."
                )


@functools.partial(jax.jit, static_argnums=(0, 2))
def cut_all(axes: tuple[int | None, ...], outs: tuple, extent: int) -> tuple:
    def cut(x: jax.Array, axis: int, extent: int) -> jax.Array:
        return jax.lax.slice_in_dim(x, 0, extent, axis=axis)

    return grow(cut, axes, outs, extent)
