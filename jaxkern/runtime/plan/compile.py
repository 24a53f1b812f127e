"""`plan = compile(f, *specs)`: a function compiled for arguments of these shapes."""

from collections.abc import Callable, Sequence
from typing import Any, overload

from jaxkern.runtime.plan.plan import Plan
from jaxkern.runtime.plan.record import lower
from jaxkern.runtime.plan.symbolic_plan import SymbolicPlan


@overload
def compile(
    f: Callable,
    *specs: Any,
    donate: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    command_buffers: str = "auto",
    bounds: None = None,
) -> Plan: ...
@overload
def compile(
    f: Callable,
    *specs: Any,
    donate: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    command_buffers: str = "auto",
    bounds: dict[str, tuple[int, int]],
) -> SymbolicPlan: ...
def compile(
    f: Callable,
    *specs: Any,
    donate: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    command_buffers: str = "auto",
    bounds: dict[str, tuple[int, int]] | None = None,
) -> Plan | SymbolicPlan:
    """Compiles a function for arguments of these shapes.

    Args:
      f: any traceable function, or what `jax.jit` makes of one.
      specs: one per argument: a pytree of arrays or of `jax.ShapeDtypeStruct`. Only
        shapes, dtypes and shardings count.
      donate: positions of arguments whose buffers the results may take over.
      compiler_options: of XLA, by name, such as `{"xla_cpu_enable_fast_math": True}`.
      command_buffers: "auto" leaves to XLA what it captures into CUDA graphs, "off"
        captures nothing, "all" everything it can. Without effect on a CPU.
      bounds: sizes that stay open, as `{"n": (1, 4096)}`, both ends included. The dims
        of `specs` name them: `jax.ShapeDtypeStruct(("n", 64), "float32")`.

    Returns:
      A `Plan`, or a `SymbolicPlan` where `bounds` are given.

    Raises:
      ValueError: an unknown `command_buffers`, or bounds and dims that do not agree.

    Example:
      >>> from jaxkern import runtime
      >>> plan = runtime.compile(jnp.sin, jax.ShapeDtypeStruct((2,), "float32"))
      >>> plan(jnp.zeros(2)), len(plan)  # one instruction
      (Array([0., 0.], dtype=float32), 1)
    """
    if bounds is not None:
        rest = {
            "donate": donate,
            "compiler_options": compiler_options,
            "command_buffers": command_buffers,
        }
        return SymbolicPlan(f, specs, bounds, rest)
    return Plan.of(lower(f, specs, donate, compiler_options, command_buffers))
