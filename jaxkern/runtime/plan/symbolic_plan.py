"""Plans for sizes that are known only at the call, within bounds."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxkern.runtime.plan.plan import Plan
from jaxkern.runtime.plan.record import lower


class SymbolicPlan:
    """A function compiled for sizes within bounds, one executable per size in use.

        plan = compile(f, jax.ShapeDtypeStruct(("n", 64), "float32"),
                       bounds={"n": (1, 4096)})
        plan(x)              # n comes from x; an executable is made at its first use
        plan.at(n=128)       # ... or ahead of it

    XLA's shapes are static, so a new size compiles, under the contexts (`backend`,
    matmul precision) of the call that brings it; a size that was there does not. For
    few executables over many sizes see `bucketed`. Safe under threads.

    Attributes:
      variables: the open sizes with their bounds, both ends included.
      plans: `Plan`s by their sizes, in the order of `variables`.
    """

    def __init__(
        self,
        f: Callable,
        specs: tuple,
        bounds: dict[str, tuple[int, int]],
        options: dict[str, Any],
    ):
        self.function, self.specs, self.options = f, specs, options
        self.variables = {name: (int(lo), int(hi)) for name, (lo, hi) in bounds.items()}
        self.plans: dict[tuple[int, ...], Plan] = {}
        self.lock = threading.Lock()
        self.dims = [dims_of(leaf) for leaf in jax.tree.leaves(specs)]
        used = {d for dims in self.dims for d in dims if isinstance(d, str)}
        if used != set(self.variables):
            raise ValueError(
                f"compile: the dims name {sorted(used)}, `bounds` "
                f"{sorted(self.variables)}. Each open size needs both."
            )
        for name, (lo, hi) in self.variables.items():
            if not 0 <= lo <= hi:
                raise ValueError(f"compile: the bounds of {name} are {lo} and {hi}.")

    def __call__(self, *args: Any) -> Any:
        return self.at(**self.sizes(args))(*args)

    def at(self, **sizes: int) -> Plan:
        """The plan for these sizes, compiled unless it is there already.

        Raises:
          TypeError: a size is no integer.
          ValueError: a size is missing or out of bounds.
        """
        key = tuple(self.checked(sizes)[name] for name in self.variables)
        plan = self.plans.get(key)
        if plan is None:
            made = Plan.of(lower(self.function, self.specs_at(sizes), **self.options))
            with self.lock:  # compiled outside of it: other sizes need not wait
                plan = self.plans.setdefault(key, made)
        return plan

    def checked(self, sizes: dict[str, int]) -> dict[str, int]:
        if set(sizes) != set(self.variables):
            raise ValueError(
                f"plan: takes the sizes {list(self.variables)}, got {sorted(sizes)}."
            )
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int | np.integer):
                raise TypeError(f"plan: {name} must be an integer, got {size!r}.")
            lo, hi = self.variables[name]
            if not lo <= size <= hi:
                raise ValueError(f"plan: {name} is {size}, not between {lo} and {hi}.")
        return sizes

    def specs_at(self, sizes: dict[str, int]) -> tuple:
        leaves, tree = jax.tree.flatten(self.specs)
        fixed = [
            jax.ShapeDtypeStruct(
                tuple(sizes[d] if isinstance(d, str) else d for d in dims), leaf.dtype
            )
            for leaf, dims in zip(leaves, self.dims, strict=True)
        ]
        return jax.tree.unflatten(tree, fixed)

    def sizes(self, args: tuple) -> dict[str, int]:
        """What the shapes of some arguments say of the open sizes.

        Raises:
          TypeError: they do not fit the specs, or one another.
        """
        leaves, tree = jax.tree.flatten(args)
        if tree != jax.tree.structure(self.specs):
            raise TypeError(
                f"plan: the arguments are {tree}, the specs "
                f"{jax.tree.structure(self.specs)}."
            )
        found: dict[str, int] = {}
        for n, (leaf, dims) in enumerate(zip(leaves, self.dims, strict=True)):
            fits = len(leaf.shape) == len(dims)
            for size, dim in zip(leaf.shape, dims, strict=False):
                want = found.setdefault(dim, size) if isinstance(dim, str) else dim
                fits = fits and size == want
            if not fits:
                known = ", ".join(f"{name} = {size}" for name, size in found.items())
                raise TypeError(
                    f"plan: array {n} has shape {tuple(leaf.shape)}, not "
                    f"{tuple(dims)} with {known or 'no size yet'}."
                )
        return found


def dims_of(spec: Any) -> tuple[int | str, ...]:
    """Sizes and names; a symbolic size of jax.export counts if it is one variable."""
    dims = tuple(d if isinstance(d, int) else str(d) for d in spec.shape)
    for d in dims:
        if isinstance(d, str) and not d.isidentifier():
            raise ValueError(f"compile: the dim {d!r} must be one name or one number.")
    return dims
