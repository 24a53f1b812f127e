"""A compiled function that one can read: `plan = compile(f, *specs)`.

XLA's executable already is the flat, resolved list of work that other systems build by
hand. A `Plan` is that executable with the list in view: instructions, memory map,
launches, times. Nothing of it is computed before it is asked for.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import jax

from jaxkern.primitives.linear.policy import Policy, current_policy
from jaxkern.runtime.plan.compiler_dump import (
    CommandBufferReport,
    CompilerDump,
    dump_compilation,
    module_of,
    read_thunks,
)
from jaxkern.runtime.plan.hlo_module import HloModule
from jaxkern.runtime.plan.instructions import (
    Instruction,
    count_views,
    list_instructions,
)
from jaxkern.runtime.plan.memory_map import MemoryMap, memory_map
from jaxkern.runtime.plan.profile import (
    Limits,
    Profile,
    dispatch_seconds,
    profile_executable,
)
from jaxkern.runtime.plan.report import Report, report_of
from jaxkern.runtime.trace import fault_points

if TYPE_CHECKING:
    from jaxkern.runtime.plan.symbolic_plan import SymbolicPlan

EVERY_KIND = (
    "FUSION,CUBLAS,CUBLASLT,CUDNN,COLLECTIVES,CONDITIONAL,WHILE,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION"
)
COMMAND_BUFFERS: dict[str, dict[str, Any]] = {
    "auto": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "all": {
        "xla_gpu_enable_command_buffer": EVERY_KIND,
        "xla_gpu_graph_min_graph_size": 1,
    },
}


@overload
def compile(
    f: Callable,
    *specs: Any,
    donate: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    command_buffers: str = "auto",
    bounds: None = None,
) -> "Plan": ...
@overload
def compile(
    f: Callable,
    *specs: Any,
    donate: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    command_buffers: str = "auto",
    bounds: dict[str, tuple[int, int]],
) -> "SymbolicPlan": ...
def compile(
    f: Callable,
    *specs: Any,
    donate: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    command_buffers: str = "auto",
    bounds: dict[str, tuple[int, int]] | None = None,
) -> "Plan | SymbolicPlan":
    """Compiles a function for arguments of these shapes.

    Args:
      f: any traceable function, or what `jax.jit` makes of one.
      specs: one per argument: arrays, or `jax.ShapeDtypeStruct`s, in pytrees. Only
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
    """
    if bounds is not None:
        from jaxkern.runtime.plan.symbolic_plan import SymbolicPlan  # it calls this

        rest = {
            "donate": donate,
            "compiler_options": compiler_options,
            "command_buffers": command_buffers,
        }
        return SymbolicPlan(f, specs, bounds, rest)
    stage = lower(f, specs, donate, compiler_options, command_buffers)
    return stage.compile()


class Lowered(NamedTuple):
    """A function as the compiler gets it."""

    function: Any
    traced: Any
    lowered: jax.stages.Lowered
    options: dict[str, Any]
    donate: tuple[int, ...]
    policy: Policy | None

    def compile(self) -> "Plan":
        fault_points.hit("compile")
        start = time.perf_counter()
        compiled = self.lowered.compile(compiler_options=self.options or None)
        return Plan(compiled, time.perf_counter() - start, self)


def lower(
    f: Callable,
    specs: tuple,
    donate: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    command_buffers: str = "auto",
) -> Lowered:
    """All of `compile` but the compiler."""
    if command_buffers not in COMMAND_BUFFERS:
        raise ValueError(
            f"compile: `command_buffers` must be one of {', '.join(COMMAND_BUFFERS)}, "
            f"got {command_buffers!r}."
        )
    donate = (donate,) if isinstance(donate, int) else tuple(donate)
    # a jitted function keeps what it was jitted with
    keeps = hasattr(f, "trace") and not donate
    jitted: Any = f if keeps else jax.jit(f, donate_argnums=donate)
    traced = jitted.trace(*specs)
    options = {**COMMAND_BUFFERS[command_buffers], **(compiler_options or {})}
    return Lowered(jitted, traced, traced.lower(), options, donate, current_policy())


class Plan:
    """A compiled function, called as the function is; see `compile`.

    A call goes straight to `jax.stages.Compiled` and returns before the device is done,
    as every call of JAX; `jax.block_until_ready` waits.

    Attributes:
      compiled: the executable.
      compile_seconds: that XLA took, or reading the machine code from a file.
      stage: what it was compiled from; None for machine code from a file.
    """

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        compile_seconds: float,
        stage: Lowered | None = None,
    ):
        self.compiled, self.compile_seconds = compiled, compile_seconds
        self.stage = stage

    def __call__(self, *args, **kwargs):
        return self.compiled(*args, **kwargs)

    @functools.cached_property
    def devices(self) -> set[jax.Device]:
        """All that it runs on."""
        compiled = self.compiled
        leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        return {d for s in leaves for d in s.device_set} or {jax.devices()[0]}

    @property
    def device(self) -> jax.Device:
        """The first device that it runs on."""
        return min(self.devices, key=lambda d: d.id)

    @property
    def platform(self) -> str:
        """ "cpu" or "gpu"."""
        return self.device.platform

    @property
    def policy(self) -> Policy | None:
        """The dtype policy in force when it was compiled; None from a file."""
        return self.stage and self.stage.policy

    @functools.cached_property
    def module(self) -> HloModule:
        """XLA's optimised module."""
        return module_of(self.compiled)

    @functools.cached_property
    def _instructions(self) -> tuple[Instruction, ...]:
        return list_instructions(self.module)

    def instructions(self) -> tuple[Instruction, ...]:
        """All that one call executes, in order; bodies of loops before the loop."""
        return self._instructions

    def __len__(self) -> int:
        """Number of `instructions()`."""
        return len(self._instructions)

    def __bool__(self) -> bool:
        return True  # also of a function that returns its argument

    @functools.cached_property
    def nops(self) -> int:
        """Instructions of the module that cost nothing: they only name buffers."""
        return count_views(self.module)

    @functools.cached_property
    def uncaptured(self) -> "Plan":
        """The same plan without CUDA graphs; itself where nothing is captured."""
        if self.platform == "cpu" or self.stage is None:
            return self
        options = self.stage.options | COMMAND_BUFFERS["off"]
        return self.stage._replace(options=options).compile()

    @functools.cached_property
    def _dump(self) -> CompilerDump | None:
        if self.stage is None:
            return None
        return dump_compilation(self.stage.lowered, self.stage.options)

    @functools.cached_property
    def _memory(self) -> MemoryMap:
        stats = self.compiled.memory_analysis()
        if stats is None:
            raise NotImplementedError("plan: this platform does not report its memory.")
        module, assignment = self.module, stats.serialized_buffer_assignment_proto
        if not assignment and self._dump is not None and self._dump.module is not None:
            module, assignment = self._dump.module, self._dump.buffer_assignment
        return memory_map(stats, module, assignment, "XLA shows no places here.")

    def memory(self) -> MemoryMap:
        """Bytes of arguments, results and temporaries, and each buffer's place.

        On a GPU the first call compiles once more, since only a dump shows the places.
        """
        return self._memory

    @functools.cached_property
    def _command_buffers(self) -> CommandBufferReport:
        if self.platform == "cpu":
            return CommandBufferReport((), {}, "a CPU has none")
        if self._dump is None:
            return CommandBufferReport(
                (), {}, "machine code does not show its launches"
            )
        return read_thunks(self._dump.thunks, self._dump.module or self.module)

    def command_buffer_report(self) -> CommandBufferReport:
        """Launches inside and outside CUDA graphs.

        On a GPU the first call compiles once more, since only a dump shows them.
        """
        return self._command_buffers

    def report(self) -> Report:
        """What XLA made of the function: equations before, instructions after."""
        return report_of(self)

    def dispatch_overhead(self, *args: Any, calls: int = 200) -> float:
        """Seconds that one call costs the host beside the work, measured.

        The time of an executable with the same arguments that computes nothing.

        Args:
          args: of the function; zeros if there are none.
          calls: number of calls; the median of their times counts.
        """
        return dispatch_seconds(self, args, calls)

    def profile(
        self, *args: Any, calls: int = 5, limits: Limits | None = None
    ) -> Profile:
        """Runs the function under JAX's profiler: time, bytes and share per kernel.

        A trace shows a CUDA graph as one event, so on a GPU the kernels are timed in
        `uncaptured`, which the first call compiles; `seconds` is of the plan itself.

        Args:
          args: of the function. Donated ones are copied for each call.
          calls: number of calls; their mean counts.
          limits: of the device; measured at the first profile if None.

        Returns:
          A `Profile`; its `note` says in words where the trace shows no kernels.
        """
        return profile_executable(self, args, calls, limits)

    def source(self, level: str) -> str:
        """The program at a level: "jaxpr", "stablehlo" or "hlo" (optimised).

        Raises:
          ValueError: an unknown level, or one that machine code does not keep.
        """
        if level == "hlo":
            return self.compiled.as_text() or ""
        if level not in ("jaxpr", "stablehlo"):
            raise ValueError(
                f"plan: `level` must be jaxpr, stablehlo or hlo, got {level!r}."
            )
        if self.stage is None:
            raise ValueError(f"plan: machine code does not keep its {level}.")
        if level == "jaxpr":
            return str(self.stage.traced.jaxpr)
        return self.stage.lowered.as_text()

    def save(self, path: str | Path, *, platforms: Sequence[str] | None = None) -> None:
        """Writes the function to a file; `jaxkern.runtime.load` reads it.

        The file holds the StableHLO of `jax.export`, which other devices and later
        versions of jax can compile, and the machine code for this very device.

        Args:
          path: of the file, replaced in one step if it exists.
          platforms: that the StableHLO is for, such as `("cpu", "cuda")`; this
            machine's if None.

        Raises:
          ValueError: the function cannot be exported; the message says why.
        """
        from jaxkern.runtime.plan.saved_plan import save_plan  # it makes Plans

        save_plan(self, path, platforms)

    def __str__(self) -> str:
        return "\n".join(map(str, self._instructions))

    def __repr__(self) -> str:
        return f"Plan({self.module.name}, {len(self)} instructions, {self.platform})"
